"""``blis-replay verify``."""

from __future__ import annotations

import click

from blis_replay.validate.cli.options import form_options, print_answer
from blis_replay.validate.cli.progress import progress_line


@click.command("verify")
@click.option("--quick", is_flag=True, help="Fewer requests and replications: seconds, with wider intervals.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Of all random workloads."
)
@form_options
def command(quick: bool, seed: int, form: str | None) -> int:
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
    from blis_replay.validate.verification_text import rows_frame, verification_json, verification_text

    with progress_line("verifying") as told:
        rows = list(verify(seed, quick, told))
    print_answer(
        form,
        text=lambda: verification_text(rows, seed),
        document=lambda: verification_json(rows, seed, quick),
        frame=lambda: rows_frame(rows),
    )
    return 0 if all(row.passed for row in rows) else 1
