"""Whole recordings, damaged: ``python scripts/fuzz_ingest.py RECORDING... [--seconds N] [--seed N]``.

Each round copies one of the directories (of its large files only the beginning), damages one file or two, and
runs ``blis-replay ingest`` and ``inspect`` on it in this process.  They may answer 0 or 3, with one
line of complaint at most; what was stored before must be there as it was.  A round that breaks a
rule stops the run with the directory left in place.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fuzz_mutations import mutated_bytes, mutated_file, mutated_json, mutated_rows, mutated_table

from blis_replay.ingest.errors import printable
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.validate.cli.main import main as blis_replay

KEPT_BYTES = 20_000
MAX_SECONDS_A_ROUND = 30
_MUTATORS = {".json": mutated_json, ".jsonl": mutated_json, ".csv": mutated_rows, ".parquet": mutated_table}


def main(arguments: Sequence[str]) -> None:
    """Damage and ingest for so many seconds; prints how many rounds there were and how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="blis-replay-fuzz-"))
    os.environ["BLIS_REPLAY_STORE"] = str(scratch / "store.duckdb")
    small = [_shortened(path, scratch / "small" / str(number)) for number, path in enumerate(given.recordings)]
    for path in small[:3]:
        _call("ingest", path)
    warnings.simplefilter("error")
    stored = _experiments()
    ends: Counter[int] = Counter()
    until, number = time.monotonic() + given.seconds, given.seed
    while time.monotonic() < until:
        number += 1
        ends[_round(random.Random(number), small, scratch / "round")] += 1  # noqa: S311 - the same again from its seed
        if number % 100 == 0:
            _check(_experiments()[: len(stored)] == stored, "what was stored before is not what it was")
            print(f"{number - given.seed} rounds, last seed {number}: {dict(ends)}", flush=True)
    print(f"{sum(ends.values())} rounds, seeds {given.seed + 1} to {number}: {dict(ends)}")
    shutil.rmtree(scratch)


def _shortened(recording: Path, copy: Path) -> Path:
    """A copy of a recording whose files keep their first lines only."""
    for path in sorted(recording.rglob("*")):
        if path.is_file() and not path.name.startswith("truth"):
            copied = copy / recording.name / path.relative_to(recording)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(_beginning(path))
    return copy / recording.name


def _beginning(path: Path) -> bytes:
    """The file, or if it is long its content as far as it is whole lines or whole objects."""
    content = path.read_bytes()
    packed = content.startswith((GZIP_MAGIC, ZSTD_MAGIC))
    if len(content) <= KEPT_BYTES and not packed:
        return content
    head = RecordedFile(path, path.name).head(20 * KEPT_BYTES)
    if head[:1] == b"[":  # an array of records
        records = json.loads(head[: head.rfind(b"}, {") + 1] + b"]") if b"}, {" in head else []
        head = json.dumps(records[:20]).encode()
    elif b"\n" in head[:KEPT_BYTES]:
        head = head[: head.rfind(b"\n", 0, KEPT_BYTES) + 1]
    elif len(head) < 20 * KEPT_BYTES:
        return content
    return gzip.compress(head, 1) if content.startswith(GZIP_MAGIC) else head


def _round(rng: random.Random, recordings: Sequence[Path], copy: Path) -> int:
    shutil.rmtree(copy, ignore_errors=True)
    source = rng.choice(recordings)
    directory = copy / "20260101-000000-damaged-7b-tp1-general"
    shutil.copytree(source, directory)
    for _ in range(rng.randint(1, 2)):
        _damage(rng, directory)
    begin = time.monotonic()
    ended, complaint = _call("ingest", directory)
    if ended == 0:
        _check(complaint == "", f"a success that complains: {complaint}")
        inspected, complaint = _call("inspect", "--experiment", directory.name)
        _check(inspected == 0, f"stored and not to be inspected: {complaint}")
    else:
        _check(ended == 3, f"exit code {ended}: {complaint}")
        _check(complaint.endswith("\n"), f"not one line: {complaint!r}")
        _check(printable(complaint[:-1]) == complaint[:-1], f"not one printable line: {complaint!r}")
        _check(len(complaint) < 2000, "an endless line")
    _check(time.monotonic() - begin < MAX_SECONDS_A_ROUND, "too slow")
    return ended


def _damage(rng: random.Random, directory: Path) -> None:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    if not paths:
        return
    path = rng.choice(paths)
    action = rng.choice(["structure"] * 6 + ["bytes", "bytes", "cut", "away", "twice"])
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


def _call(*arguments: object) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    sys.argv = ["blis-replay", *map(str, arguments)]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
            blis_replay()
    except SystemExit as ended:
        return int(ended.code or 0), complaint.getvalue()
    raise AssertionError("a command that does not end")


def _experiments() -> list[object]:
    shown = io.StringIO()
    sys.argv = ["blis-replay", "experiments", "--json"]
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        blis_replay()
    listed = json.loads(shown.getvalue())["experiments"]
    return [row for row in listed if "damaged" not in row["slug"]]


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


if __name__ == "__main__":
    main(sys.argv[1:])
