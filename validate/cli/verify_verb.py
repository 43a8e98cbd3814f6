"""``blis-replay verify``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.options import json_option, print_json

if TYPE_CHECKING:
    from blis_replay.blis.verification.row import VerificationRow


@click.command("verify")
@click.option("--quick", is_flag=True, help="Fewer requests and replications: seconds, with wider intervals.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Of all random workloads."
)
@json_option
def command(quick: bool, seed: int, as_json: bool) -> int:
    """Check the simulator itself: no recording is needed.

    Conservation, determinism, liveness, overload, causality, the limits of every step, phase
    linearity, and waiting times against M/M/1 with 99.9 % intervals.  About one seed
    in fifty fails an interval by chance; the default seed fails none.

    \b
    Examples:
      blis-replay verify
      blis-replay verify --quick
      blis-replay verify --seed 7 --json

    Exit codes: 0 all checks passed, 1 one failed.
    """
    from blis_replay.blis.verification.suite import verify

    rows = list(verify(seed, quick, _progress))
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    failed = [row for row in rows if not row.passed]
    if as_json:
        print_json({"passed": not failed, "seed": seed, "quick": quick, "checks": [asdict(row) for row in rows]})
    else:
        click.echo(_text(rows))
        click.echo("\n+- is half of a 99.9 % interval over independent replications.")
        click.echo(f"{len(rows) - len(failed)} of {len(rows)} checks passed (seed {seed})")
    return 1 if failed else 0


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\033[Kverifying: {name}", nl=False, err=True)


def _text(rows: Sequence[VerificationRow]) -> str:
    from blis_replay.ingest.printable import printable
    from blis_replay.validate.terminal import table

    widest = max(len(printable(row.detail)) for row in rows)
    cells = [
        [
            "pass" if row.passed else "FAIL",
            row.check,
            row.configuration,
            f"{row.measured:,.7g}",
            f"{row.expected:,.7g}",
            # The table sets columns of numbers flush right; the last one is text.
            row.detail.ljust(widest),
        ]
        for row in rows
    ]
    header = ["", "check", "configuration", "measured", "expected", "detail".ljust(widest)]
    return table(header, cells, left=3)
