"""The verb ``blis-replay verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from blis_replay.ingest.tables import Cell, Column, Table, Toned, table_of
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import verb
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.text.answer import Answer, Block
from blis_replay_labs.verification.workloads import VerificationRow

_GROUP_COLUMNS = (Column("", "text"), Column("check", "text"), Column("passed", "word"))
_COLUMNS = (
    Column("", "text"),
    Column("check", "text"),
    Column("measured", "data"),
    Column("expected", "data"),
    Column("configuration", "text", below=True),
    Column("detail", "text", below=True),
)


_REPLICATIONS = "+- is half of a 99.9 % interval over independent replications."


def verification_answer(rows: Sequence[VerificationRow], seed: int, quick: bool, note: str = _REPLICATIONS) -> Answer:
    """The checks with what was measured and expected, and how many passed."""
    cells: list[list[Cell]] = [
        [_word(row.passed), *(row.check, row.measured, row.expected, row.configuration, row.detail)] for row in rows
    ]
    passed, records = all(row.passed for row in rows), [asdict(row) for row in rows]
    counted = f"{sum(row.passed for row in rows)} of {len(rows)} checks passed (seed {seed})"
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
@click.option("--quick", is_flag=True, help="Seconds, with wider intervals.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Of all workloads.")
@click.option("--faults", is_flag=True, help="Check blame on planted faults.")
@click.option("--calibration", is_flag=True, help="Check fits to known servers.")
@click.option("--verdicts", is_flag=True, help="Check verdicts on noisy servers.")
@click.option("--changes", is_flag=True, help="Check what changes are found.")
def verify_verb(quick: bool, seed: int, faults: bool, calibration: bool, verdicts: bool, changes: bool) -> int:
    """Check the simulator itself: no recording is needed.

    Conservation, determinism, liveness, overload, causality, the limits of every step, phase
    linearity, and waiting times against M/M/1 (99.9 % intervals: one seed in fifty fails one).

    \b
    --faults: some 380 planted faults, and whether the right part is blamed.
      Of them 86 need the data pack (BLIS_REPLAY_DATA).
    --calibration: fits to 50 servers whose coefficients are known.
    --verdicts: `validate` and `gate` on 42 noisy servers of known error.
    --changes: change points in histories, and two recordings held to a bound.

    docs/how-it-works.md says what each must show.

    \b
    Examples:
      blis-replay verify
      blis-replay verify --faults --quick
      blis-replay verify --seed 7 --json

    Exit codes: 0 all checks passed, 1 one failed.
    """
    if faults:
        from blis_replay_labs.planted.scoreboard import scoreboard, scoreboard_answer

        with progress_line("planting") as progress:
            board = scoreboard(quick, progress)
        return print_answer(scoreboard_answer(board))
    if calibration:
        from blis_replay_labs.planted.known_servers import fit_all, known_answer

        with progress_line("calibrating") as progress:
            fits = fit_all(quick, progress)
        return print_answer(known_answer(fits))
    if verdicts:
        from blis_replay_labs.verification.verdicts import verdict_rows

        with progress_line("judging") as progress:
            rows = verdict_rows(seed, quick, progress)
        return print_answer(verification_answer(rows, seed, quick, "each bar with its bounds and how many recordings."))
    if changes:
        from blis_replay_labs.verification.changes import history_rows, recording_rows

        with progress_line("finding changes") as progress:
            rows = [*history_rows(quick, progress), *recording_rows(seed, quick, progress)]
        return print_answer(verification_answer(rows, seed, quick, "each bar with its bounds and how many series."))
    from blis_replay_labs.verification.suite import verify

    with progress_line("verifying") as progress:
        rows = list(verify(seed, quick, progress))
    return print_answer(verification_answer(rows, seed, quick))
