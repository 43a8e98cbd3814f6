"""``blis-replay compare``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.base.addons import needed_addon
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    bounds_option,
    coefficients_option,
    history_option,
    name_option,
    store_option,
    timeout_option,
    verb,
)

if TYPE_CHECKING:
    from blis_replay.ingest.store import Store
    from blis_replay.validate.comparison.bounds import Bound
    from blis_replay.validate.text.answer import Answer


@verb("compare", longer="With --simulators: print a table per recording too.")
@click.argument("sides", nargs=-1, metavar="[A B | EXPERIMENT...]")
@name_option("experiment", "Replayed by a release or a simulator.")
@coefficients_option
@click.option("--blis-binary", metavar="PATH", help="The BLIS binary, for a side that is blis.")
@click.option(
    "--simulators",
    "asked",
    multiple=True,
    metavar="all|NAME,...",
    help="Each of these simulators on the experiments (a lab).",
)
@click.option("--explain", is_flag=True, help="With --simulators: what costs each most (slow).")
@timeout_option
@history_option
@bounds_option
@click.option("--published", is_flag=True, help="Our errors beside published ones.")
@click.option("--held-out", "unseen", is_flag=True, help="With --published: only what is held out.")
@store_option
@form_options
def compare_verb(
    sides: tuple[str, ...],
    experiment: str | None,
    coefficients: str | None,
    blis_binary: str | None,
    asked: tuple[str, ...],
    explain: bool,
    timeout_s: float,
    history: Path | None,
    bounds: tuple[Bound, ...],
    published: bool,
    unseen: bool,
    store_path: Path,
) -> int:
    """Two of anything side by side: what differs, by how much, and why.

    A and B are each an experiment (its recording), EXPERIMENT@RELEASE (replayed now), a
    coefficient release or a simulator (embedded, blis; both with --experiment).  Shown are
    all metrics with bootstrap intervals of the difference, and the inputs that differ.

    With --simulators, how far every simulator is from every experiment that is named,
    what it was fitted on, and what it took; exit code 4 if none of them answered.

    \b
    Examples:
      blis-replay compare 34b-general 34b-general@h100-vllm-0.15.1
      blis-replay compare old.yaml new.yaml --experiment 34b-general
      blis-replay compare embedded blis -e 34b-general --blis-binary ./blis
      blis-replay compare 7b-train --simulators embedded,floor:line -o board.md
      blis-replay compare --published --held-out
    """
    from blis_replay.ingest.store import open_for_reading

    if asked:
        if published or unseen or experiment:
            raise click.UsageError("--simulators goes with experiments alone; leave other choices out")
        board = needed_addon("compare", "simulators", "--simulators")
        options = {"explain": explain, "coefficients": coefficients, "blis_binary": blis_binary, "timeout_s": timeout_s}
        return print_answer(board(store_path, sides, asked, **options))
    if history is not None:
        if published or experiment:
            raise click.UsageError("--history goes with experiments alone; leave other choices out")
        from blis_replay.validate.history import history_of, read
        from blis_replay.validate.history_text import history_answer

        return print_answer(history_answer(str(history), history_of(read(history), sides), bounds), "history")
    if explain:
        raise click.UsageError("--explain goes with --simulators; name both")
    if unseen and not published:
        raise click.UsageError("--held-out goes with --published; name both")
    if (len(sides) == 2) == published or len(sides) not in (0, 2):
        raise click.UsageError("name two sides, A and B; or use --simulators or --published")
    if published:
        beside = needed_addon("compare", "published", "--published")
        return print_answer(beside(store_path, coefficients, unseen=unseen))
    with open_for_reading(store_path) as store:
        return print_answer(_two(store, sides, experiment, coefficients, blis_binary))


def _two(
    store: Store, sides: tuple[str, ...], experiment: str | None, coefficients: str | None, blis_binary: str | None
) -> Answer:
    from blis_replay.base.errors import NothingToJudgeError
    from blis_replay.replay.simulator import EmbeddedEngine
    from blis_replay.validate.comparison.differences import differences, differences_answer
    from blis_replay.validate.comparison.named_sides import Choice, side_of
    from blis_replay.validate.comparison.validated import judged_replay
    from blis_replay.validate.comparison.verdict_text import below_verdicts

    choice = Choice(experiment, coefficients, blis_binary)
    a, b = (side_of(store, side, choice) for side in sides)
    judged = []
    for run in filter(None, (a.run, b.run)):
        with suppress(NothingToJudgeError):  # of an arrival trace
            own = EmbeddedEngine(run.release) if run.simulator == EmbeddedEngine.name else None
            judged.append(judged_replay(store, run, own))
    return below_verdicts(differences_answer(differences(a, b)), judged)
