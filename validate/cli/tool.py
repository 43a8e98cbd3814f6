"""The verbs of the program itself: ``blis-replay doctor``, ``verify`` and ``study``."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from blis_replay.ingest.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, table_of
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    store_option,
    verb,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.text.answer import Answer, Block, Line

if TYPE_CHECKING:
    from pathlib import Path

    from blis_replay.blis.verification.workloads import VerificationRow


_PACKAGES = ("click", "duckdb", "grpcio", "numba", "numpy", "polars", "protobuf", "pyarrow", "scipy")
# What changes where things are kept or run.
_VARIABLES = ("BLIS_REPLAY_STORE", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Found:
    """One thing looked at.

    ``state``: ``ok``, ``absent`` (optional, or not there yet: ``fix`` says how to get it) or ``problem`` (``fix``
    says what to do).
    """

    topic: str
    name: str
    state: Literal["ok", "absent", "problem"]
    value: str
    fix: str = ""


def diagnose(store_path: Path) -> list[Found]:
    """Versions, store, compiled code, optional parts, settings; nothing is made or compiled."""
    return [
        Found("versions", "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_package(name) for name in ("blis-replay", *_PACKAGES)),
        _store(store_path),
        *_compiled(),
        *_optional(),
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
        exit_code=3 if problems else 0,
    )


def _line(one: Found, width: int) -> Line:
    mark = {"ok": "", "absent": "absent: ", "problem": "PROBLEM: "}[one.state]
    shown = Toned(mark.strip(), "bad" if one.state == "problem" else "caution") if mark else None
    fix = f"; {one.fix}" if one.fix else ""
    return Line(f"  {one.name.ljust(width)}  {mark}{one.value}{fix}", " " * (width + 4), shown)


def _package(name: str) -> Found:
    try:
        return Found("versions", name, "ok", version(name))
    except PackageNotFoundError:
        return Found("versions", name, "problem", "not installed", "install blis-replay again")


def _store(path: Path) -> Found:
    from blis_replay.ingest.errors import IngestError
    from blis_replay.ingest.store import SCHEMA_VERSION, list_experiments, open_store

    if not path.exists():
        return Found("kept", "store", "absent", str(path), "the first ingest or validation makes it; --store moves it")
    try:
        with open_store(path, read_only=True) as store:
            count = len(list_experiments(store))
    except IngestError as error:
        return Found("kept", "store", "problem", str(error))
    size_mb = path.stat().st_size / 1e6
    return Found("kept", "store", "ok", f"{path}: {size_mb:,.1f} MB, schema {SCHEMA_VERSION}, experiments: {count:,}")


def _compiled() -> list[Found]:
    from blis_replay.blis.kernel import state as kernel
    from blis_replay.ingest.scan import words as scan

    return [_cache("compiled engine", kernel.kept_in()), _cache("compiled scans", scan.kept_in())]


def _cache(name: str, folder: Path | None) -> Found:
    if folder is None:
        fix = "every process compiles afresh; point NUMBA_CACHE_DIR at a folder that is yours alone"
        return Found("kept", name, "problem", "no folder that only this user can write", fix)
    from blis_replay.compiled.files import damaged

    if spoiled := damaged(folder):
        value = f"{folder}: {len(spoiled)} damaged, the first {spoiled[0].name}"
        return Found("kept", name, "problem", value, "they are compiled afresh when used; or remove the folder")
    kept = list(folder.rglob("*.nbc"))
    if not kept:
        return Found("kept", name, "absent", str(folder), "the first use compiles for some 10 seconds")
    size_mb = sum(file.stat().st_size for file in kept) / 1e6
    return Found("kept", name, "ok", f"{folder}: warm, {len(kept)} functions, {size_mb:,.1f} MB")


def _optional() -> list[Found]:
    binary = shutil.which("blis")
    return [
        _extra("jinja2", "for report: pip install 'blis-replay[report]'"),
        _extra("grpcio", "for the spans of record: pip install 'blis-replay[record]'"),
        Found("optional", "blis", "ok", binary)
        if binary
        else Found(
            *("optional", "blis", "absent", "no binary on the PATH"),
            "for --simulator blis: build it from inference-sim and give --blis-binary PATH",
        ),
    ]


def _extra(name: str, fix: str) -> Found:
    try:
        return Found("optional", name, "ok", version(name))
    except PackageNotFoundError:
        return Found("optional", name, "absent", "not installed", fix)


@verb("doctor")
@store_option
@form_options
def doctor_verb(store_path: Path) -> int:
    """Say what is installed, where things are kept, and what stands in the way.

    Versions, the store, the compiled code (and whether it is warm), optional parts with how to get
    them, and the settings of the environment.  Nothing is made or compiled.

    \b
    Examples:
      blis-replay doctor
      blis-replay doctor --store shared.duckdb --json

    Exit codes: 0 nothing stands in the way, 3 something does.
    """
    return print_answer(doctor_answer(diagnose(store_path)))


_GROUP_COLUMNS = (Column("", "text"), Column("check", "text"), Column("passed", "word"))
_COLUMNS = (
    Column("", "text"),
    Column("check", "text"),
    Column("measured", "significant"),
    Column("expected", "significant"),
    Column("configuration", "text", below=True),
    Column("detail", "text", below=True),
)


def verification_answer(rows: Sequence[VerificationRow], seed: int, quick: bool) -> Answer:
    """The checks with what was measured and expected, and how many passed."""
    cells: list[list[Cell]] = [
        [_word(row.passed), *(row.check, row.measured, row.expected, row.configuration, row.detail)] for row in rows
    ]
    passed, records = all(row.passed for row in rows), [asdict(row) for row in rows]
    counted = f"{sum(row.passed for row in rows)} of {len(rows)} checks passed (seed {seed})"
    note = "+- is half of a 99.9 % interval over independent replications."
    return Answer(
        [Table("", _COLUMNS, cells, cut=True), Block([note, counted])],
        {"passed": passed, "seed": seed, "quick": quick, "checks": records},
        table_of(records),
        exit_code=0 if passed else 1,
        brief=[_groups(rows), *_failed(rows, cells), Block([counted, "more: -v prints what each check measured"])],
    )


def _groups(rows: Sequence[VerificationRow]) -> Table:
    """A line for each kind of check, with how many of it passed."""
    groups: dict[str, list[bool]] = {}
    for row in rows:
        groups.setdefault(row.check, []).append(row.passed)
    lines: list[list[Cell]] = [
        [_word(all(passed)), name, f"{sum(passed)} of {len(passed)}"] for name, passed in groups.items()
    ]
    return Table("", _GROUP_COLUMNS, lines, cut=True)


def _failed(rows: Sequence[VerificationRow], cells: Sequence[Sequence[Cell]]) -> list[Table]:
    shown = [line for row, line in zip(rows, cells, strict=True) if not row.passed]
    return [Table("", _COLUMNS, shown, cut=True)] if shown else []


def _word(passed: bool) -> Toned:
    return Toned("pass", "good") if passed else Toned("FAIL", "bad")


@verb("verify", longer="Print what each check measured.")
@click.option("--quick", is_flag=True, help="Fewer requests and replications: seconds, with wider intervals.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Seed for all random workloads."
)
@click.option("--faults", is_flag=True, help="Plant faults in recordings and simulators, and grade what is said.")
@click.option("--calibration", is_flag=True, help="Calibrate to servers whose coefficients are known.")
@form_options
def verify_verb(quick: bool, seed: int, faults: bool, calibration: bool) -> int:
    """Check the simulator itself: no recording is needed.

    Conservation, determinism, liveness, overload, causality, the limits of every step, phase
    linearity, and waiting times against M/M/1 with 99.9 % intervals.  About one seed
    in fifty fails an interval by chance; the default seed fails none.

    With --faults the instrument checks and `explain` are checked instead: some 300 faults are planted,
    one or two at a time. For each it shows what found it, what was blamed, the verdict, and whether that is
    right.  It fails where something else is blamed, or a run with a fault passes.

    With --calibration `calibrate` is checked: 50 servers of known coefficients are recorded with noise and
    without, each is fitted, and the fit predicts another load of it. It fails where the mean of E2E is off
    by more than 1 %, with noise only where one that knows the server but for its noise does better.

    \b
    Examples:
      blis-replay verify
      blis-replay verify --quick
      blis-replay verify --faults --quick
      blis-replay verify --calibration --quick
      blis-replay verify --seed 7 --json

    Exit codes: 0 all checks passed, 1 one failed.
    """
    if faults:
        from blis_replay.validate.faults import scoreboard, scoreboard_answer

        with progress_line("planting") as progress:
            board = scoreboard(quick, progress)
        return print_answer(scoreboard_answer(board))
    if calibration:
        from blis_replay.validate.fit.known_servers import fit_all, known_answer

        with progress_line("calibrating") as progress:
            fits = fit_all(quick, progress)
        return print_answer(known_answer(fits))
    from blis_replay.blis.verification.suite import verify

    with progress_line("verifying") as progress:
        rows = list(verify(seed, quick, progress))
    return print_answer(verification_answer(rows, seed, quick))
