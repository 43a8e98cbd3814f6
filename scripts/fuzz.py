"""Run every verb on damaged input: ``python scripts/fuzz.py WHAT [RECORDING...] [--seconds N] [--seed N]``.

WHAT is ``recordings`` (the given directories, by default those that ship, damaged a file or two at a time, ingested,
then through some verbs), ``stores`` (a sound store with bytes changed), or ``yaml`` (releases, policies and engine
files).

The rules: a verb ends with 0, or with 1 and a verdict, or with 2 or 3 and one printable line on standard error (or
an answer).  It stays within a limit of time and memory.  A recording that was stored before is still there.  A broken
rule is printed with the seed of its round, which repeats it (``--seed N --rounds 1``); its folder is kept in
``--findings``.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

os.environ["POLARS_MAX_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # inputs are too small to be shared

import blis_replay.blis.releases
import blis_replay.fixtures
import blis_replay.replay
import blis_replay.validate
from blis_replay.base.errors import printable
from blis_replay.validate.cli.main import main as run_command

LIMIT_S, LIMIT_BYTES = 60, 4 << 30  # of one command
KEPT_LINES, KEPT_ITEMS, LONGEST_LINE = 40, 9, 2_000
RELEASE, SOUND = "h100-vllm-0.15.1", "34b-codegen"
VERBS = (
    ("inspect", "{}"),
    ("validate", "{}", "--json"),
    ("validate", "{}", "--replay", "scheduling=synchronous,prefix=none"),
    ("explain", "{}", "--jobs", "1"),
    ("compare", "{}", SOUND),
    ("report", "{}", "--out", "report.html"),
    ("timeline", "{}", "--out", "trace.json"),
    ("calibrate", "{}", "--out", "mine.yaml", "--force", "--jobs", "1"),
    ("gate", RELEASE, "--experiment", "{}", "--junit", "gate.xml"),
    ("simulate", "{}", "--set", "max_num_seqs=16"),
    ("coefficients", "test", "{}"),
    ("list",),
)
# What JSON has where a number, a text or an object is expected; where integers of files end; what is no number.
ODD: tuple[Any, ...] = (
    *(None, True, "", "7", "NaN", "\ud800", "\x00", "\x1b[31m", "a\nb", "x" * 600, [], [[]], {}, {"a": None}, [None]),
    *(edge + nudge for power in (31, 32, 53, 63, 64) for edge in (1 << power,) for nudge in (-1, 0, 1)),
    *(-1, 0, 10**19, 10**400, 1e300, -1e300, 5e-324, float("nan"), float("inf"), 0.5),
)
CELLS = ("", '"', '"a', "nan", "inf", "1e30", "-0.0", "0x10", "[", "\x00", "\x1b[31m", "é", "9" * 400, str(1 << 63))
PIECES = (b"\xef\xbb\xbf", b"\r", b"\n", b"\x00", b"\xff", b'"', b"\\u", b"[", b"]", b"{", b"}", b",", b"\x1f\x8b")
YAML_PIECES = (
    *("!!python/object:os.system x", "!!int abc", "&a [*a]", "? [1]", "9" * 5000, "1:2:3:4:5", ".inf", ".nan", "-1"),
    *("1e400", "2001-01-01", "~", "[]", "{}", "\x00", "\t", "---", "'", "@", "{" * 200, "[" * 3000, "- " * 500),
)
ENGINE = "max_num_seqs: 8\nmax_num_batched_tokens: 256\nmax_model_len: 4096\nasync_scheduling: true\n"
POLICY = "schema: blis-replay/gate-policy/1\nthresholds:\n  e2e: {mean: 10 %}\ncoverage:\n  experiments: 1\n"


# -- Damage -----------------------------------------------------------------------------------


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with a stretch cut out, doubled, moved or overwritten."""
    begin = rng.randrange(len(content) + 1)
    end = min(len(content), begin + rng.choice([0, 1, 2, 8, 64, 1 << 12]))
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            content[:begin] + content[end:],
            content[:begin],
            content[:at] + content[begin:end] + content[at:],
            content[:begin] + rng.choice(PIECES) + content[end:],
            content[:begin] + rng.randbytes(end - begin) + content[end:],
            content[:begin] + content[begin:end] * rng.choice([2, 9, 200]) + content[end:],
        ]
    )


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """A JSON text, or one of its lines, with up to three values replaced, doubled, nested or taken out."""
    lines = content.split(b"\n")
    for place in (None, rng.randrange(len(lines))):
        try:
            document = json.loads(content if place is None else lines[place])
        except (ValueError, RecursionError):
            continue
        for _ in range(rng.randint(1, 3)):
            _damage_value(document, rng)
        text = json.dumps(document, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
        if place is None:
            return text
        lines[place : place + rng.randint(0, 1)] = [text]
        return b"\n".join(lines)
    return damaged_bytes(content, rng)


def _damage_value(document: Any, rng: random.Random) -> None:
    """Change one place of a JSON value, as deep as chance leads."""
    while isinstance(document, dict | list) and document:
        key = rng.choice(list(document)) if isinstance(document, dict) else rng.randrange(len(document))
        inner = document[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            document = inner
            continue
        action = rng.choice(["odd", "odd", "delete", "nest", "repeat"])
        if action == "delete":
            del document[key]
        elif action == "repeat" and isinstance(document, list):
            document[key:key] = [inner] * rng.choice([1, 3, 50])
        elif action == "nest":
            for _ in range(rng.choice([1, 2, 70])):
                document[key] = rng.choice([[document[key]], {"a": document[key]}])
        else:
            document[key] = rng.choice(ODD)
        return


def damaged_rows(content: bytes, rng: random.Random) -> bytes:
    """A table in text with a cell replaced, a row doubled or a cell left out."""
    rows = [row.split(b",") for row in content.split(b"\n")]
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    action = rng.choice(["cell", "cell", "cell", "row", "cut"])
    if action == "cell":
        row[place] = rng.choice(CELLS).encode()
    elif action == "row":
        rows.insert(rng.randrange(len(rows) + 1), list(row))
    else:
        del row[place]
    return b"\n".join(b",".join(row) for row in rows)


def damaged_yaml(content: bytes, rng: random.Random) -> bytes:
    """YAML with a value replaced by something odd, or damaged bytes."""
    values = [match.span(1) for match in re.finditer(rb":[ ]+([^\n]+)", content)]
    if not values or rng.random() < 0.5:
        return damaged_bytes(content, rng)
    begin, end = rng.choice(values)
    return content[:begin] + rng.choice(YAML_PIECES).encode() + content[end:]


def damaged_file(path: Path, rng: random.Random) -> None:
    """Damage a file by what it is; compressed ones inside."""
    content, name = path.read_bytes(), path.name.removesuffix(".gz")
    packed = content.startswith(b"\x1f\x8b")
    if packed and rng.random() < 0.9:
        content = gzip.decompress(content)
    by_ending = {"json": damaged_json, "jsonl": damaged_json, "csv": damaged_rows, "yaml": damaged_yaml}
    damage = by_ending.get(name.rpartition(".")[2], damaged_bytes) if rng.random() < 0.85 else damaged_bytes
    content = damage(content, rng)
    path.write_bytes(gzip.compress(content, 1) if packed and path.name.endswith(".gz") else content)


def shortened(path: Path) -> bytes:
    """The beginning of a file as far as it is whole lines, or a document with few records."""
    content = path.read_bytes()
    packed = content.startswith(b"\x1f\x8b")
    content = gzip.decompress(content) if packed else content
    try:
        content = json.dumps(_few(json.loads(content))).encode()
    except ValueError:
        content = b"".join(content.splitlines(keepends=True)[:KEPT_LINES])
    return gzip.compress(content, 1) if packed else content


def _few(document: Any) -> Any:
    if isinstance(document, dict):
        return {key: _few(value) for key, value in document.items()}
    return [_few(item) for item in document[:KEPT_ITEMS]] if isinstance(document, list) else document


# -- Commands and their rules -----------------------------------------------------------------


class BrokenRuleError(Exception):
    """What a command did that it may not."""


def called(*arguments: str) -> int:
    """The exit code of a command in a process of its own; raises ``BrokenRuleError``."""
    out, error = Path("stdout.txt"), Path("stderr.txt")
    if not (child := os.fork()):
        _be(arguments, out, error)
    _, status, _ = os.wait4(child, 0)
    code, said = os.waitstatus_to_exitcode(status), error.read_text("utf-8", "replace")
    problem = ""
    if code not in (0, 1, 2, 3, 4):
        problem = f"exit code {code}"
    elif "Traceback" in said or any(printable(line) != line for line in said.splitlines()):
        problem = "a traceback, or what is not printable"
    elif code in (2, 4) and len(said.splitlines()) != 1 and not out.read_text("utf-8", "replace"):
        problem = "not one line on standard error"
    elif any(len(line) > LONGEST_LINE for line in said.splitlines()):
        problem = "a line too long"
    if problem:
        raise BrokenRuleError(f"{' '.join(arguments)}: {problem}: {said[-600:]}")
    return code


def _be(arguments: Iterable[str], out: Path, error: Path) -> None:
    """Become the command, within its limits."""
    for path, stream in ((out, sys.stdout), (error, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(LIMIT_S)
    sys.argv = ["blis-replay", *arguments]
    code: object = 70
    try:
        run_command()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 70)


def recordings(rng: random.Random, given: argparse.Namespace) -> None:
    """A damaged recording through an ingest and some verbs."""
    source = rng.choice(given.paths)
    name = Path(f"20260101-000000-{source.name}-damaged")
    name.mkdir()
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for path in files:
        (name / path.name).write_bytes(shortened(path))
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(sorted(name.iterdir()) or [name / "none.json"])
        if path.exists() and rng.random() < 0.9:
            damaged_file(path, rng)
        elif path.exists():
            path.unlink()
    if called("ingest", str(name)) == 0:
        for verb in rng.sample(VERBS, given.verbs):
            called(*(word.format(name) for word in verb))
    if called("inspect", SOUND) != 0:
        raise BrokenRuleError(f"{SOUND}, stored before, is lost")


def stores(rng: random.Random, given: argparse.Namespace) -> None:
    """A store with bytes changed, half of them in the first pages, where DuckDB keeps what the rest is."""
    path = Path("store.duckdb")
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 64])):
        at = rng.randrange(min(len(content), 300_000) if rng.random() < 0.5 else len(content))
        content[at : at + rng.choice([1, 8])] = rng.randbytes(rng.choice([1, 8]))
    path.write_bytes(bytes(content[: rng.randrange(len(content))] if rng.random() < 0.2 else content))
    for verb in (("list",), *rng.sample(VERBS, given.verbs)):
        called(*(word.format(SOUND) for word in verb))


def yaml(rng: random.Random, given: argparse.Namespace) -> None:
    """Something odd in YAML, where a user gives it."""
    release = next(Path(blis_replay.blis.releases.__path__[0]).rglob(f"{RELEASE}.yaml")).read_bytes()
    text, *verb = rng.choice(
        [
            (release, "validate", SOUND, "--coefficients", "given.yaml"),
            (release, "coefficients", "show", "given.yaml"),
            (POLICY.encode(), "gate", RELEASE, "--experiment", SOUND, "--policy", "given.yaml"),
            (ENGINE.encode(), "ingest", str(given.paths[0]), "--engine", "given.yaml"),
        ]
    )
    for _ in range(rng.choice([1, 1, 3])):
        text = damaged_yaml(text, rng)
    Path("given.yaml").write_bytes(text)
    called(*verb)


KINDS: dict[str, Callable[[random.Random, argparse.Namespace], None]] = {
    "recordings": recordings,
    "stores": stores,
    "yaml": yaml,
}


def main() -> int:
    """0: no rule was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("paths", nargs="*", type=lambda name: Path(name).resolve(), help="directories of recordings")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each next one has the next")
    parser.add_argument("--verbs", type=int, default=3, help="how many after each ingest")
    parser.add_argument("--findings", type=Path, default=Path("findings").resolve())
    given = parser.parse_args()
    given.paths = given.paths or sorted((Path(blis_replay.fixtures.__path__[0]) / "recorded").iterdir())
    until, rounds, broken = time.monotonic() + given.seconds, 0, 0
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["BLIS_REPLAY_STORE"] = "store.duckdb"
        for room in (blis_replay.blis, blis_replay.ingest, blis_replay.replay, blis_replay.validate):
            for module in walk_packages(room.__path__, f"{room.__name__}."):
                import_module(module.name)  # once: each command is a fork of this process
        called("validate", SOUND)
        while rounds < given.rounds and time.monotonic() < until:
            folder, seed = Path(name) / "round", given.seed + rounds
            folder.mkdir()
            shutil.copy("store.duckdb", folder)
            rounds += 1
            with contextlib.chdir(folder):
                try:
                    KINDS[given.what](random.Random(seed), given)  # noqa: S311 - repeated by its seed
                except BrokenRuleError as error:
                    broken += 1
                    print(f"seed {seed}: {error}", flush=True)
                    shutil.copytree(folder, given.findings / f"{given.what}-{seed}", dirs_exist_ok=True)
            shutil.rmtree(folder)
    print(f"{given.what}: {rounds} rounds, {broken} broken rules")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
