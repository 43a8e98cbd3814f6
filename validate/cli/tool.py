"""The verb of the program itself: ``blis-replay doctor``."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Literal

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Toned, table_of
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import store_option, verb
from blis_replay.validate.text.answer import Answer, Block, Line

_PACKAGES = ("click", "duckdb", "grpcio", "numba", "numpy", "polars", "protobuf", "pyarrow", "scipy")
# What changes where things are kept or run.
_VARIABLES = ("BLIS_REPLAY_STORE", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")


State = Literal["ok", "absent", "problem"]


@dataclass(frozen=True)
class Found:
    """One thing looked at.

    ``state``: ``ok``, ``absent`` (optional, or not there yet: ``fix`` says how to get it) or ``problem`` (``fix``
    says what to do).
    """

    topic: str
    name: str
    state: State
    value: str
    fix: str = ""


def diagnose(store_path: Path) -> list[Found]:
    """Versions, store, compiled code, optional parts, settings; nothing is made or compiled."""
    from blis_replay.blis.kernel import state as kernel
    from blis_replay.ingest.scan import words as scan

    binary = shutil.which("blis")
    return [
        Found("versions", "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_package("versions", name, "problem", "install blis-replay again") for name in ("blis-replay", *_PACKAGES)),
        _store(store_path),
        _cache("compiled engine", kernel.kept_in()),
        _cache("compiled scans", scan.kept_in()),
        _package("optional", "jinja2", "absent", "for report: pip install 'blis-replay[report]'"),
        _package("optional", "grpcio", "absent", "for the spans of record: pip install 'blis-replay[record]'"),
        Found("optional", "blis", "ok", binary) if binary else Found("optional", "blis", "absent", *_NO_BINARY),
        Found("settings", "processors", "ok", str(os.cpu_count() or 1)),
        *(Found("settings", name, "ok", os.environ[name]) for name in _VARIABLES if name in os.environ),
    ]


def doctor_answer(found: list[Found]) -> Answer:
    """A line each under its topic; what is absent or wrong is followed by what to do."""
    width = max(len(one.name) for one in found)
    page = [
        Block([Line(topic, mark=Toned(topic, "heading")), *(_line(one, width) for one in group)])
        for topic, group in groupby(found, key=lambda one: one.topic)
    ]
    problems = sum(one.state == "problem" for one in found)
    records = [asdict(one) for one in found]
    return Answer(
        [*page, counted(problems, "problem")],
        {"problems": problems, "found": records},
        table_of(records),
        exit_code=4 if problems else 0,
    )


def _line(one: Found, width: int) -> Line:
    mark = {"ok": "", "absent": "absent: ", "problem": "PROBLEM: "}[one.state]
    shown = Toned(mark.strip(), "bad" if one.state == "problem" else "caution") if mark else None
    fix = f"; {one.fix}" if one.fix else ""
    return Line(f"  {one.name.ljust(width)}  {mark}{one.value}{fix}", " " * (width + 4), shown)


_NO_BINARY = (
    "no binary on the PATH",
    "for --simulator blis: build it from inference-sim and give --blis-binary PATH",
)


def _package(topic: str, name: str, without: State, fix: str) -> Found:
    try:
        return Found(topic, name, "ok", version(name))
    except PackageNotFoundError:
        return Found(topic, name, without, "not installed", fix)


def _store(path: Path) -> Found:
    from blis_replay.base.errors import IngestError
    from blis_replay.ingest.store import list_experiments, open_store
    from blis_replay.ingest.store.file import SCHEMA_VERSION

    if not path.exists():
        return Found("kept", "store", "absent", str(path), "the first ingest or validation makes it; --store moves it")
    try:
        with open_store(path, read_only=True) as store:
            count = len(list_experiments(store))
    except IngestError as error:
        return Found("kept", "store", "problem", str(error))
    size_mb = path.stat().st_size / 1e6
    return Found("kept", "store", "ok", f"{path}: {size_mb:,.1f} MB, schema {SCHEMA_VERSION}, experiments: {count:,}")


def _cache(name: str, folder: Path | None) -> Found:
    if folder is None:
        fix = "every process compiles afresh; point NUMBA_CACHE_DIR at a folder that is yours alone"
        return Found("kept", name, "problem", "no folder that only this user can write", fix)
    kept = list(folder.rglob("*.nbc"))
    if not kept:
        return Found("kept", name, "absent", str(folder), "the first use compiles for some 15 seconds")
    size_mb = sum(file.stat().st_size for file in kept) / 1e6
    return Found("kept", name, "ok", f"{folder}: warm, {len(kept)} functions, {size_mb:,.1f} MB")


@verb("doctor")
@store_option
def doctor_verb(store_path: Path) -> int:
    """Say what is installed, where things are kept, and what stands in the way.

    Versions, the store, the compiled code (and whether it is warm), optional parts with how to get
    them, and the settings of the environment.  Nothing is made or compiled.

    \b
    Examples:
      blis-replay doctor
      blis-replay doctor --store shared.duckdb --json

    Exit codes: 0 nothing stands in the way, 4 something does.
    """
    return print_answer(doctor_answer(diagnose(store_path)))
