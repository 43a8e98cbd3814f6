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
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

os.environ["POLARS_MAX_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # inputs are too small to be shared

from fuzz_kills import WRITTEN, kills
from fuzz_mutations import mutated_bytes, mutated_file, mutated_json, mutated_rows, mutated_table
from fuzz_rounds import ENGINE, Arguments, Campaign, Ended, called, in_process, verb_of
from fuzz_sound import DAMAGED, RELEASE, SERVED, SIMULATE, SOUND, is_there, sound_store, stepped, verbs

import blis_replay.validate
from blis_replay.blis.verification.conservation import check_conservation
from blis_replay.blis.verification.workloads import scenarios
from blis_replay.compiled.files import SUFFIX, damaged
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.store import file as store_file

KEPT_BYTES, KEPT_RECORDS, MAX_DOCUMENT_BYTES = 4_000, 9, 16_000_000
_MUTATORS = {".json": mutated_json, ".jsonl": mutated_json, ".csv": mutated_rows, ".parquet": mutated_table}
_STEPPED_SHARE = 0.05  # of recordings with steps enough to calibrate
# They draw hundreds of samples, fit, or draw pictures: no oftener than every verb has to.
_SLOW, _TABLE_EVERY = ("explain", "report", "calibrate", "whatif", "timeline"), 12
_PACKAGE = Path(blis_replay.validate.__file__).parents[1]
_ROOMS = ("compiled", "strict", "blis", "ingest", "fixtures", "replay", "validate")


def recordings(campaign: Campaign) -> None:
    """Damaged recordings, each through an ingest and as many verbs as are asked for, in turn, and all in one table."""
    small = [_shortened(path, campaign.scratch / "small" / str(i)) for i, path in enumerate(campaign.given.paths)]
    # Most of them of the sorts that take least time, so that there are many.
    weights = [1 / sum(path.stat().st_size for path in copy.rglob("*") if path.is_file()) for copy in small]
    small, weights = [*small, stepped(campaign.scratch)], [*weights, sum(weights) * _STEPPED_SHARE]
    template = sound_store(campaign)
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
                yield from map(is_there, stored if not campaign.given.verbs else stored[:2])
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


def _shortened(recording: Path, copy: Path) -> Path:
    """A copy of a recording whose files keep their first lines only, said to be of the model that is known."""
    for path in sorted(recording.rglob("*")):
        if path.is_file() and not path.name.startswith("truth"):
            copied = copy / recording.name / path.relative_to(recording)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(_beginning(path))
    config = copy / recording.name / "exp-config.yaml"
    lines = config.read_text("utf-8").splitlines() if config.exists() else []
    lines = [line for line in lines if line.partition(":")[0] not in SERVED]
    if not any(line.startswith("max_num_seqs") for line in lines):
        lines += ["max_num_batched_tokens: 2048", "max_num_seqs: 128", "max_model_len: 4096"]
    config.write_text("\n".join([*(f"{key}: {value}" for key, value in SERVED.items()), *lines, ""]), "utf-8")
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
    content = sound_store(campaign).read_bytes()

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
    template = sound_store(campaign)
    shipped = _PACKAGE / "blis" / "releases"
    release = next(iter(sorted(shipped.rglob(f"{RELEASE}*.yaml")))).read_text("utf-8")
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
        (policy, ("gate", "--coefficients", RELEASE, "--experiment", SOUND, "--policy", "given.yaml")),
        (workload, (*SIMULATE, "--out", "run", "--workload", "given.yaml")),
        (ENGINE, (*SIMULATE, "--out", "run", "--experiment", SOUND, "--engine", "given.yaml")),
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
    """Compiled code, cut off, empty or changed: of one small function, or with ``--verbs`` what two verbs load."""
    whole, small, wanted = campaign.scratch / "cache", campaign.scratch / "small", b""
    small.mkdir()
    (small / "doubling.py").write_text(_SMALL, "utf-8")
    made = in_process(campaign.scratch, lambda: iter([Ended((str(stepped(campaign.scratch)),), 0)]))  # loads the engine
    recording = Path(made[0].arguments[0])

    def small_one() -> Iterator[Ended]:
        sys.path.insert(0, str(small))
        answer = import_module("doubling").doubled(21)
        yield Ended(("load",), 0, "" if answer == 42 else f"21 doubled is {answer}")

    def of_verbs() -> Iterator[Ended]:
        yield called(("ingest", str(recording)))
        validated = called(("validate", recording.name, "--json", "--out", "answer.json"))
        same = validated.code == 1 and Path("answer.json").read_bytes() == (wanted or Path("answer.json").read_bytes())
        yield Ended(validated.arguments, validated.code, "" if same else f"another answer; {validated.problem}")

    def loaded(folder: Path) -> Iterator[Ended]:
        os.environ["NUMBA_CACHE_DIR"] = str(folder / "cache")
        yield from of_verbs() if campaign.given.verbs else small_one()
        left = [path for known in folder.glob("cache/blis-replay/*") for path in damaged(known)]
        yield Ended(("load",), 0, f"damaged, and left so: {left}" if left else "")

    (campaign.scratch / "ended.jsonl").unlink()
    ended = in_process(campaign.scratch, lambda: loaded(campaign.scratch))
    if any(one.problem for one in ended):
        sys.exit(f"the sound code is not: {ended}")
    if campaign.given.verbs:
        wanted = (campaign.scratch / "answer.json").read_bytes()

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        shutil.copytree(whole, folder / "cache")
        _damage_code(rng, rng.choice(sorted((folder / "cache").rglob(f"*{SUFFIX}"))))
        return in_process(folder, lambda: loaded(folder))

    campaign.run(work)


def _damage_code(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        content = content[: rng.choice([0, 1, rng.randrange(len(content))])]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


_SAME_AGAIN = ("for-model", "roofline", "export-defaults", "import-defaults", "import-stepml", "generalize", "list")


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
    parser.add_argument(
        "--verbs",
        type=int,
        default=0,
        help="how many verbs a recording, or a store; 0: all, or 3; of cache: by `validate`",
    )
    parser.add_argument("--enough", type=int, default=300, help="recordings that each verb meets before it may rest")
    parser.add_argument("--only", nargs="*", choices=WRITTEN, help="of kills: these verbs")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    given = parser.parse_args(arguments)
    given.paths = [path.resolve() for path in given.paths]
    given.findings.mkdir(parents=True, exist_ok=True)
    given.findings = given.findings.resolve()
    for path in sorted(_PACKAGE.rglob("*.py")):  # an editable package cannot be walked
        parts = path.relative_to(_PACKAGE).with_suffix("").parts
        if parts[0] in _ROOMS and not {"collector", "ray", "__init__"} & set(parts):
            import_module(".".join(("blis_replay", *parts)))
    if given.what != "cache":
        check_conservation(scenarios(1, 10))  # loads the engine, or compiles it, once for all rounds
    kinds[given.what](Campaign(given))


if __name__ == "__main__":
    main(sys.argv[1:])
