"""SIGKILL at a random moment of each writing verb; ``fuzz_verbs kills`` runs it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from bench_collect import Load, message, over_http, spans_on_disk
from fuzz_rounds import Campaign, Ended, be_child, called, in_process
from fuzz_sound import RELEASE, SERVED, SIMULATE, SOUND, is_there, sound_store

from blis_replay.blis.latency.datasheets import bundled_architectures, config_of

OTHER = "other-34b-tp2-roleplay"
_PORT = 14_318
WRITTEN = {
    "report": ("report", SOUND, "--out", "out"),
    "timeline": ("timeline", SOUND, "--out", "out.json"),
    "export": ("export", SOUND, "--to", "legacy-csv", "--out", "out", "--force"),
    "calibrate": ("calibrate", SOUND, "--out", "out.yaml", "--force"),
    "gate": ("gate", "--coefficients", RELEASE, "--experiment", SOUND, "--junit", "out"),
    "simulate": (*SIMULATE, "--experiment", SOUND, "--out", ".", "--force"),
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
# Those that write nothing but the store, and those that write the same bytes each time.
_IN_STORE = ("validate", "ingest")
_SAME_AGAIN = ("for-model", "roofline", "export-defaults", "import-defaults", "import-stepml", "generalize", "list")
_TIMES = 31  # the first of them is not killed: how long it takes, and what it leaves
# Of StepML: what `import-stepml` needs at least.
_ARTIFACT = {
    "version": 1,
    "step_time": {"model_type": "linear", "intercept": 13_546.0, "feature_coefficients": {"num_decode_reqs": 40.3}},
    "queueing_time": {"model_type": "linear", "intercept": 9_300.0, "feature_coefficients": {}},
}


def kills(campaign: Campaign) -> None:
    """SIGKILL at a random moment of each writing verb: the store opens, and files are old or new, never half."""
    template = sound_store(campaign)
    _add_inputs(template.parent)
    order = [name for name in WRITTEN if name in (campaign.given.only or WRITTEN)] * _TIMES
    campaign.given.rounds = min(campaign.given.rounds, len(order))
    took: dict[str, float] = {}
    made: dict[str, dict[str, bytes]] = {}  # by verb: the files that it leaves when it is not killed

    def work(rng: random.Random, folder: Path) -> list[Ended]:
        name = order[campaign.rounds - 1]
        arguments = WRITTEN[name]
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
        ended = in_process(folder, lambda: iter([is_there(SOUND)]))
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


def _add_inputs(folder: Path) -> None:
    """Add to what `sound_store` made what other writing verbs need: a second recording, and documents."""
    shutil.copytree(folder / SOUND, folder / OTHER)
    config = config_of(bundled_architectures()[str(SERVED["model"])])
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
