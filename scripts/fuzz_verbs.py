"""Every verb on what nobody meant: ``python scripts/fuzz_verbs.py WHAT [--seconds N] [--rounds N] [--seed N]``.

WHAT is ``recordings`` (the directories given, damaged a file or two at a time, ingested, then through every verb),
``stores`` (a sound store with some bytes changed), ``yaml`` (coefficients, policies, workloads, engines and
configurations), ``cache`` (compiled code) or ``kills`` (each writing verb ended by SIGKILL, 30 times).

Each round is a process of its own that has all modules loaded, with a store, a home and a working directory of its
own.  A verb ends with 0 and no complaint, with 2 or 3 and one printable line, or with 1 and a verdict; it takes a
bounded time and memory, warnings are errors, and what was stored before is there as it was.  What breaks a rule is
kept in ``--findings`` with the command, and the run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["POLARS_MAX_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # inputs are too small to be shared

from bench_collect import Load, message, over_http, spans_on_disk
from fuzz_mutations import mutated_bytes, mutated_file, mutated_json, mutated_rows, mutated_table
from fuzz_rounds import ENGINE, Arguments, Campaign, Ended, be_child, called, in_process, verb_of

import blis_replay.validate
from blis_replay.blis.latency.datasheets import bundled_architectures, config_of
from blis_replay.blis.verification.conservation import check_conservation
from blis_replay.blis.verification.workloads import scenarios
from blis_replay.fixtures.planted import PLANTED
from blis_replay.fixtures.synthetic import generate, write_experiment
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.recording import SharedPrefix, Stage
from blis_replay.ingest.store import file as store_file

KEPT_BYTES, KEPT_RECORDS, MAX_DOCUMENT_BYTES = 4_000, 9, 16_000_000
_MUTATORS = {".json": mutated_json, ".jsonl": mutated_json, ".csv": mutated_rows, ".parquet": mutated_table}
# What coefficients there are for; the recordings are said to be of it, so that they are simulated.
_SERVED: dict[str, Any] = {"model": "codellama/CodeLlama-34b-Instruct-hf", "tensor_parallelism": 2}
DAMAGED, SOUND = "20260101-000000-damaged-34b-tp2-general", "sound-34b-tp2-codegen"
OTHER = "other-34b-tp2-roleplay"
# Enough busy steps, of 0.2 s each, for four windows of 5 s that `calibrate` and its like need; 40 requests of them.
_STEPPED = replace(
    PLANTED,
    slug="20260101-000000-stepped-34b-tp2-codegen",
    model=_SERVED["model"],
    tensor_parallelism=_SERVED["tensor_parallelism"],
    stages=(Stage(0, 0.8, 22_000_000), Stage(1, 1.0, 22_000_000)),
    shared_prefix=SharedPrefix(2, 3, 64, 200, 30),
    latency=replace(PLANTED.latency, intercept_ns=200_000_000),
)
_STEPPED_FILES = ("exp-config.yaml", "profile.yaml", "trace.csv.gz", "traces.json", "vllm.log")
_STEPPED_SHARE = 0.05
# They draw hundreds of samples, fit, or draw pictures: no oftener than every verb has to.
_SLOW, _TABLE_EVERY = ("explain", "report", "calibrate", "whatif", "timeline"), 12
_RELEASE = "h100-vllm-0.15.1"
_PACKAGE = Path(blis_replay.validate.__file__).parents[1]
_ROOMS = ("compiled", "strict", "blis", "ingest", "fixtures", "replay", "validate")
_SIMULATE = ("simulate", "--engine", "engine.yaml", "--coefficients", _RELEASE, "--model", "codellama-34b-instruct-hf")


def verbs(name: str) -> list[Arguments]:
    """Every verb that is about an experiment; what they write lies in the working directory."""
    return [
        ("inspect", name),
        ("validate", name, "--json"),
        ("validate", name, "--replay", "scheduling=synchronous,prefix=none"),
        ("explain", name, "--workers", "1"),
        ("segments", name),
        ("compare", name, SOUND),
        ("compare", SOUND, name),
        ("compare", name, f"{name}@{_RELEASE}"),
        ("report", name, "--out", "report.html"),
        ("timeline", name, "--out", "trace.json"),
        ("timeline", name, "--for", "500ms", "--out", "trace.pftrace"),
        *(("export", name, "--to", form, "--force") for form in ("tracev2", "legacy-csv", "mooncake", "parquet")),
        ("calibrate", name, "--out", "mine.yaml", "--force", "--workers", "1"),
        ("gate", "--coefficients", _RELEASE, "--experiment", name, "--junit", "gate.xml"),
        ("whatif", name, "--set", "max_num_seqs=16"),
        (*_SIMULATE, "--experiment", name, "--out", "run", "--force", "--csv-tables"),
        ("coefficients", "steps", name),
        ("coefficients", "generalize", "--lowo", name, SOUND, "--gpu", "H100-SXM"),
        ("list",),
    ]


def recordings(campaign: Campaign) -> None:
    """Damaged recordings, each through an ingest and as many verbs as are asked for, in turn, and all in one table."""
    small = [_shortened(path, campaign.scratch / "small" / str(i)) for i, path in enumerate(campaign.given.paths)]
    # Most of them of the sorts that take least time, so that there are many.
    weights = [1 / sum(path.stat().st_size for path in copy.rglob("*") if path.is_file()) for copy in small]
    small, weights = [*small, _stepped(campaign.scratch)], [*weights, sum(weights) * _STEPPED_SHARE]
    template = _sound_store(campaign)
    campaign.damaged = DAMAGED.partition("000000")[0]

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        shutil.copy(template, folder / "store.duckdb")

        def commands() -> Iterator[Ended]:
            stored = [SOUND]
            with _opened_once() if rng.random() < 0.96 else contextlib.nullcontext():
                for number in range(campaign.given.batch):
                    name = DAMAGED.replace("000000", f"{number:06}")
                    shutil.copytree(rng.choices(small, weights)[0], folder / name)
                    for _ in range(rng.randint(1, 2)):
                        _damage(rng, folder / name)
                    yield (ingested := called(("ingest", name)))
                    if ingested.code == 0:
                        stored.append(name)
                        yield from map(called, _in_turn(campaign, rng, name))
                yield from map(_is_there, stored if not campaign.given.verbs else stored[:2])
            if campaign.rounds % _TABLE_EVERY == 0:
                yield called(("validate", *stored, "--workers", "1"))

        return in_process(folder, commands)

    campaign.run(work)


def _in_turn(campaign: Campaign, rng: random.Random, name: str) -> list[Arguments]:
    """So many of the verbs, those first that have met the fewest recordings; one if all met enough; 0: all."""
    known = verbs(name)
    if not (count := campaign.given.verbs):
        return known
    behind: dict[str, list[Arguments]] = {}
    for arguments in rng.sample(known, len(known)):
        behind.setdefault(verb_of(arguments), []).append(arguments)
    enough = campaign.given.enough
    order = sorted(behind, key=lambda verb: (verb in _SLOW and campaign.met[verb] >= enough, campaign.met[verb]))
    taken = [verb for place, verb in enumerate(order[:count]) if not place or campaign.met[verb] < enough]
    campaign.met.update(taken)  # of this process: the next one counts what ended
    return [behind[verb][0] for verb in taken]


@contextlib.contextmanager
def _opened_once() -> Iterator[None]:
    """The store is opened once for all commands: that takes longer than what most of them do with it."""
    path = Path(os.environ["BLIS_REPLAY_STORE"])
    first = store_file._waited_for(path, read_only=False)
    store_file._refuse_macros(first, path)
    usual = store_file._waited_for, store_file._refuse_macros
    store_file._waited_for = lambda *_given: first.cursor()
    store_file._refuse_macros = lambda *_given: None
    try:
        yield
    finally:
        store_file._waited_for, store_file._refuse_macros = usual
        first.close()


def _is_there(name: str) -> Ended:
    found = called(("inspect", name))
    return Ended(
        found.arguments, found.code, found.problem or ("" if found.code == 0 else "an older recording is lost")
    )


def _sound_store(campaign: Campaign) -> Path:
    """A store with one sound recording, made in a process of its own."""
    folder = campaign.scratch / "sound"
    folder.mkdir()
    (folder / "engine.yaml").write_text(ENGINE, "utf-8")
    sound = _stepped(folder).rename(folder / SOUND)

    def commands() -> Iterator[Ended]:
        yield called(("ingest", sound.name))
        yield called(("validate", SOUND))
        for arguments in verbs(SOUND):
            called(arguments)
        (folder / "modules").write_text(" ".join(sys.modules), "utf-8")

    ended = in_process(folder, commands)
    if any(one.problem or one.code not in (0, 1) for one in ended):
        sys.exit(f"the sound recording is not: {ended}")
    for module in (folder / "modules").read_text("utf-8").split():  # what a child would load again and again
        with contextlib.suppress(ImportError):
            import_module(module)
    return folder / "store.duckdb"


def _stepped(folder: Path) -> Path:
    write_experiment(generate(_STEPPED), folder / _STEPPED.slug, files=_STEPPED_FILES)
    return folder / _STEPPED.slug


def _shortened(recording: Path, copy: Path) -> Path:
    """A copy of a recording whose files keep their first lines only, said to be of the model that is known."""
    for path in sorted(recording.rglob("*")):
        if path.is_file() and not path.name.startswith("truth"):
            copied = copy / recording.name / path.relative_to(recording)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(_beginning(path))
    config = copy / recording.name / "exp-config.yaml"
    lines = config.read_text("utf-8").splitlines() if config.exists() else []
    lines = [line for line in lines if line.partition(":")[0] not in _SERVED]
    if not any(line.startswith("max_num_seqs") for line in lines):
        lines += ["max_num_batched_tokens: 2048", "max_num_seqs: 128", "max_model_len: 4096"]
    config.write_text("\n".join([*(f"{key}: {value}" for key, value in _SERVED.items()), *lines, ""]), "utf-8")
    return copy / recording.name


def _beginning(path: Path) -> bytes:
    """The file, or if it is long its content as far as it is whole lines or a document with few records."""
    content = path.read_bytes()
    packed = content.startswith((GZIP_MAGIC, ZSTD_MAGIC))
    if len(content) <= KEPT_BYTES and not packed:
        return content
    head = RecordedFile(path, path.name).head(MAX_DOCUMENT_BYTES)
    try:
        head = json.dumps(_few(json.loads(head))).encode()
    except ValueError:
        lines = head.splitlines(keepends=True)
        head = b"".join(lines[: max(KEPT_RECORDS, head.count(b"\n", 0, KEPT_BYTES))])[: 16 * KEPT_BYTES]
    return gzip.compress(head, 1) if content.startswith(GZIP_MAGIC) else head


def _few(document: object) -> object:
    """The document with the first items of each list."""
    if isinstance(document, dict):
        return {key: _few(value) for key, value in document.items()}
    return [_few(item) for item in document[:KEPT_RECORDS]] if isinstance(document, list) else document


def _damage(rng: random.Random, directory: Path) -> None:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    if not paths:
        return
    path = rng.choice(paths)
    action = rng.choice(["structure"] * 8 + ["bytes", "bytes", "cut", "away", "twice"])
    content = path.read_bytes()
    if action == "away":
        path.unlink()
    elif action == "twice":
        path.with_name(f"copy-{path.name}").write_bytes(content)
    elif action == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif action == "bytes":
        path.write_bytes(mutated_bytes(content, rng))
    elif content.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        path.write_bytes(mutated_file(content, rng))
    else:
        for _ in range(rng.choice([1, 1, 5])):
            content = _MUTATORS.get(path.suffix, mutated_bytes)(content, rng)
        path.write_bytes(content)


def stores(campaign: Campaign) -> None:
    """A sound store with bytes changed, through the verbs that read one."""
    content = _sound_store(campaign).read_bytes()

    quick = [arguments for arguments in verbs(SOUND) if arguments[0] not in _SLOW]

    def damaged(rng: random.Random) -> bytes:
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4, 64])):
            # Half of them in the first pages, where DuckDB keeps what the rest is.
            at = rng.randrange(min(len(changed), 300_000) if rng.random() < 0.5 else len(changed))
            changed[at : at + rng.choice([1, 1, 8])] = rng.randbytes(rng.choice([1, 1, 8]))
        return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        def commands() -> Iterator[Ended]:
            for number in range(campaign.given.batch):
                path = folder / f"store-{number}.duckdb"
                path.write_bytes(damaged(rng))
                os.environ["BLIS_REPLAY_STORE"] = str(path)
                yield called(("list",))
                yield from map(called, rng.sample(quick, campaign.given.verbs or 3))

        return in_process(folder, commands)

    campaign.run(work)


_YAML_PIECES = [
    *("!!python/object:os.system x", "!!int abc", "!!binary '*'", "!!timestamp 1", "!!set {a}", "&a [*a]", "<<: 1"),
    *("? [1]", "9" * 5000, "1:2:3:4:5", "0o9", ".inf", ".nan", "-1", "1e400", "2001-01-01", "~", "null", "[]", "{}"),
    *("\x00", "\ufeff", "\t", "---", "...", "%YAML 9.9", "'", '"', "@", "{" * 200, "[" * 3000, "- " * 500, "a: " * 200),
]


def yaml(campaign: Campaign) -> None:
    """YAML with something odd in it, at every place where a user gives one."""
    template = _sound_store(campaign)
    shipped = _PACKAGE / "blis" / "releases"
    release = next(iter(sorted(shipped.rglob(f"{_RELEASE}*.yaml")))).read_text("utf-8")
    policy = "schema: blis-replay/gate-policy/1\nthresholds:\n  e2e: {mean: 10 %}\ncoverage:\n  experiments: 1\n"
    workload = (
        "schema: blis-replay/workload/1\nseed: 1\nrequests: 9\nclients:\n  chat:\n    rate_per_s: 5\n"
        "    arrivals: {process: gamma, cv: 3}\n    prompt_tokens: {distribution: normal, mean: 64, deviation: 9}\n"
        "    output_tokens: {distribution: exponential, mean: 9}\n    prefix: {group: a, tokens: 32, members: 2}\n"
    )
    defaults = ("coefficients", "import-defaults", "given.yaml", "--out", "o.yaml")
    places: list[tuple[str, Arguments]] = [
        (release, ("validate", SOUND, "--coefficients", "given.yaml")),
        (release, ("coefficients", "show", "given.yaml")),
        (release, ("report", SOUND, "--coefficients", "given.yaml", "--out", "report.html")),
        (policy, ("gate", "--coefficients", _RELEASE, "--experiment", SOUND, "--policy", "given.yaml")),
        (workload, (*_SIMULATE, "--out", "run", "--workload", "given.yaml")),
        (ENGINE, (*_SIMULATE, "--out", "run", "--experiment", SOUND, "--engine", "given.yaml")),
        (ENGINE, ("ingest", SOUND, "--engine", "given.yaml")),
        ("models: []\ndefaults: {}\n", defaults),
    ]

    def given_text(rng: random.Random, text: str) -> bytes:
        given = text.encode()
        for _ in range(rng.choice([1, 1, 3])):
            if rng.random() < 0.5:
                given = mutated_bytes(given, rng)
            else:
                values = [match.span(1) for match in re.finditer(rb":[ ]+([^\n]+)", given)] or [(0, 0)]
                begin, end = rng.choice(values)
                given = given[:begin] + rng.choice(_YAML_PIECES).encode() + given[end:]
        return given

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        shutil.copy(template, folder / "store.duckdb")
        shutil.copytree(template.parent / SOUND, folder / SOUND)

        def commands() -> Iterator[Ended]:
            for number in range(campaign.given.batch):
                text, arguments = rng.choice([place for place in places if place[1][0] != "report" or number == 0])
                name = f"given-{number}.yaml"
                (folder / name).write_bytes(given_text(rng, text))
                yield called(tuple(name if word == "given.yaml" else word for word in arguments))

        return in_process(folder, commands)

    campaign.run(work)


_SMALL = """
from pathlib import Path
from blis_replay.compiled.functions import decorators
entry, _ = decorators(Path(__file__).parent)

@entry
def doubled(number):
    return 2 * number
"""


def cache(campaign: Campaign) -> None:
    """Compiled code of one small function, cut off, empty or changed; with ``--verbs`` once in 100 that of a verb."""
    small, whole, arguments = campaign.scratch / "small", campaign.scratch / "cache", ("verify", "--json")
    small.mkdir()
    (small / "doubling.py").write_text(_SMALL, "utf-8")
    command = [sys.executable, "-m", "blis_replay.validate.cli.main", *arguments]
    if campaign.given.verbs:
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"NUMBA_CACHE_DIR": str(whole)})

    def loaded(folder: Path) -> Ended:
        os.environ["NUMBA_CACHE_DIR"] = str(folder)
        sys.path.insert(0, str(small))
        answer = import_module("doubling").doubled(21)
        return Ended(("load",), 0, "" if answer == 42 else f"21 doubled is {answer}")

    of_small = campaign.scratch / "small-cache"
    of_small.mkdir()
    in_process(of_small, lambda: iter([loaded(of_small)]))

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        through_verb = campaign.given.verbs and campaign.rounds % 100 == 0
        shutil.copytree(whole if through_verb else of_small, folder / "cache")
        _damage_code(rng, rng.choice(sorted((folder / "cache").rglob("*.nb[ic]"))))
        if not through_verb:
            return in_process(folder, lambda: iter([loaded(folder / "cache")]))
        place = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache")}
        ended = subprocess.run(command, check=False, capture_output=True, text=True, env=place)
        problem = "" if ended.returncode == 0 and not ended.stderr else f"{ended.returncode}: {ended.stderr[-500:]}"
        return [Ended(arguments, ended.returncode, problem)]

    campaign.run(work)


def _damage_code(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        content = content[: rng.choice([0, 1, rng.randrange(len(content))])]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


_PORT = 14_318
_WRITTEN = {
    "report": ("report", SOUND, "--out", "out"),
    "timeline": ("timeline", SOUND, "--out", "out.json"),
    "export": ("export", SOUND, "--to", "legacy-csv", "--out", "out", "--force"),
    "calibrate": ("calibrate", SOUND, "--out", "out.yaml", "--force"),
    "gate": ("gate", "--coefficients", _RELEASE, "--experiment", SOUND, "--junit", "out"),
    "simulate": (*_SIMULATE, "--experiment", SOUND, "--out", ".", "--force"),
    "validate": ("validate", SOUND),
    "ingest": ("ingest", "again"),
    "segments": ("segments", SOUND, "--out", "requests.parquet"),
    "list": ("list", "--json", "--out", "out.json"),
    "whatif": ("whatif", SOUND, "--set", "max_num_seqs=16", "--json", "--out", "out.json"),
    "steps": ("coefficients", "steps", SOUND, "--json", "--out", "out.json"),
    "trees": ("coefficients", "trees", "--train", SOUND, "--out", "out.yaml"),
    "generalize": (*["coefficients", "generalize", "--gpu", "H100-SXM", "--lowo"], SOUND, OTHER, "--out", "."),
    "for-model": (*["coefficients", "for-model", "config.json", "--model", "org/new", "--out", "out.yaml"],),
    "roofline": (*["coefficients", "roofline", "config.json", "--model", "org/new", "--out", "out.yaml"],),
    "export-defaults": (*["coefficients", "export-defaults", "stepml-direct", "--out", "out.yaml"],),
    "import-defaults": (*["coefficients", "import-defaults", "defaults.yaml", "--out", "out.yaml"],),
    "import-stepml": (
        *("coefficients", "import-stepml", "artifact.json", "--model", "org/new", "--tensor-parallelism", "2"),
        *("--out", "out.yaml"),
    ),
    "collect": ("collect", "--no-ingest", "--out", "spans", "--http", f"127.0.0.1:{_PORT}", "--listen", "127.0.0.1:0"),
}
_BEFORE = "written before\n"
# Of StepML: what `import-stepml` needs at least.
_ARTIFACT = {
    "version": 1,
    "step_time": {"model_type": "linear", "intercept": 13_546.0, "feature_coefficients": {"num_decode_reqs": 40.3}},
    "queueing_time": {"model_type": "linear", "intercept": 9_300.0, "feature_coefficients": {}},
}


def kills(campaign: Campaign) -> None:
    """SIGKILL at a random moment of each writing verb: the store opens, and files are old or new, never half."""
    template = _sound_store(campaign)
    _add_inputs(template.parent)
    order = [name for name in _WRITTEN if name in (campaign.given.only or _WRITTEN)] * 30
    campaign.given.rounds = min(campaign.given.rounds, len(order))
    took: dict[str, float] = {}
    made: dict[str, dict[str, bytes]] = {}  # by verb: the files that it leaves when it is not killed

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        name = order[campaign.rounds - 1]
        arguments = _WRITTEN[name]
        shutil.copy(template, folder / "store.duckdb")
        shutil.copytree(template.parent / SOUND, folder / "again")
        for file in ("config.json", "defaults.yaml", "artifact.json"):
            shutil.copy(template.parent / file, folder)
        outputs = [folder / file for file in ("out", "out.json", "out.yaml", "summary.json", "requests.parquet")]
        for path in outputs:
            path.write_text(_BEFORE, "utf-8")
        if not (child := os.fork()):
            be_child(folder, folder / "killed.jsonl", lambda: iter([called(arguments)]))
        begin = time.monotonic()
        acknowledged = _sent_for(rng.uniform(0, 3)) if name == "collect" else 0
        if name in took:
            time.sleep(rng.uniform(0, took[name]))
        if name in took or name == "collect":
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if name == "collect":
            found = spans_on_disk(folder / "spans") if (folder / "spans").exists() else 0
            lost = f"{acknowledged} spans acknowledged, {found} on disk" if found < acknowledged else ""
            campaign.spans += acknowledged
            return [Ended(arguments, 0, lost)]
        took.setdefault(name, time.monotonic() - begin)
        ended = in_process(folder, lambda: iter([_is_there(SOUND)]))
        outputs += [path for path in folder.glob("*.yaml") if path not in outputs]
        left = {path.name: path.read_bytes() for path in outputs}
        whole = made.setdefault(name, left)
        half = [path.name for path in outputs if left[path.name] != whole.get(path.name) and not _is_whole(path)]
        if name in _SAME_AGAIN:
            half = [file for file, found in left.items() if found not in (_BEFORE.encode(), whole.get(file))]
        if whole is left and all(found == _BEFORE.encode() for found in left.values()) and name not in _IN_STORE:
            half = ["nothing was written"]
        return [Ended(arguments, 0, f"half-written: {', '.join(half)}" if half else ""), *ended]

    campaign.run(work)


# Those that write nothing but the store, and those that write the same bytes each time.
_IN_STORE = ("validate", "ingest")
_SAME_AGAIN = ("for-model", "roofline", "export-defaults", "import-defaults", "import-stepml", "generalize", "list")


def _add_inputs(folder: Path) -> None:
    """Add to what `_sound_store` made what other writing verbs need: a second recording, and documents."""
    shutil.copytree(folder / SOUND, folder / OTHER)
    config = config_of(bundled_architectures()[str(_SERVED["model"])])
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "artifact.json").write_text(json.dumps(_ARTIFACT), "utf-8")
    given = [("ingest", OTHER), ("coefficients", "export-defaults", "stepml-direct", "--out", "defaults.yaml")]
    ended = in_process(folder, lambda: map(called, given))
    if any(one.problem or one.code for one in ended[-len(given) :]):
        sys.exit(f"what the verbs need is not made: {ended}")


def _sent_for(seconds: float) -> int:
    """How many spans a collector acknowledges in so many seconds from its first answer on."""
    load = Load("request spans", "vllm.scheduler", "journey.SCHEDULED", 5, 64)
    body, acknowledged, until = message(load), 0, time.monotonic() + 60
    with over_http(f"127.0.0.1:{_PORT}") as attempt:
        while time.monotonic() < until:
            if attempt(body):
                until = until if acknowledged else time.monotonic() + seconds
                acknowledged += load.spans
            else:
                time.sleep(0.05)
    return acknowledged


def _is_whole(path: Path) -> bool:
    content = path.read_bytes()
    if content == _BEFORE.encode() or content[:4] == content[-4:] == b"PAR1":
        return True
    ends = (b"</html>", b"</testsuites>", b"</testsuite>", b"}", b"]", b'"')
    return (content.startswith((b"<", b"{", b"[", b"arrival_time")) and content.rstrip().endswith(ends)) or (
        path.suffix == ".yaml" and b"models:" in content
    )


def _load_compiled() -> None:
    """Load all compiled code that the cache has, without a thread that a child would miss."""
    check_conservation(scenarios(1, 10))  # compiles the engine where there is no cache
    for module in [module for name, module in sys.modules.items() if name.startswith("blis_replay.")]:
        for function in vars(module).values():
            if (files := getattr(getattr(function, "_cache", None), "_cache_file", None)) is not None:
                for signature, *_ in files._load_index():
                    function.compile(signature)


def main(arguments: Sequence[str]) -> None:
    """Run one kind of rounds; prints how many there were, how the commands ended, and what broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"recordings": recordings, "stores": stores, "yaml": yaml, "cache": cache, "kills": kills}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("paths", nargs="*", type=Path, help="directories of recordings")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1 << 40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10, help="recordings a round, one after the other in one process")
    parser.add_argument("--verbs", type=int, default=0, help="how many verbs a recording, or a store; 0: all, or 3")
    parser.add_argument("--enough", type=int, default=300, help="recordings that each verb meets before it may rest")
    parser.add_argument("--only", nargs="*", choices=_WRITTEN, help="of kills: these verbs")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    given = parser.parse_args(arguments)
    given.paths = [path.resolve() for path in given.paths]
    given.findings.mkdir(parents=True, exist_ok=True)
    given.findings = given.findings.resolve()
    for path in sorted(_PACKAGE.rglob("*.py")):  # an editable package cannot be walked
        parts = path.relative_to(_PACKAGE).with_suffix("").parts
        if parts[0] in _ROOMS and not {"collector", "ray", "__init__"} & set(parts):
            import_module(".".join(("blis_replay", *parts)))
    _load_compiled()
    kinds[given.what](Campaign(given))


if __name__ == "__main__":
    main(sys.argv[1:])
