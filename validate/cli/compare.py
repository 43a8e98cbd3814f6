"""``blis-replay compare``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.base.addons import needed_addon
from blis_replay.base.errors import printable
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    coefficients_option,
    history_option,
    name_option,
    repeat_option,
    store_option,
    timeout_option,
    verb,
)

if TYPE_CHECKING:
    from blis_replay.ingest.store import Store
    from blis_replay.validate.comparison.bounds import Bound
    from blis_replay.validate.comparison.differences import Differences
    from blis_replay.validate.comparison.named_sides import Choice
    from blis_replay.validate.text.answer import Answer


def _bounds(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> tuple[Bound, ...]:
    if not texts:
        return ()
    from blis_replay.validate.comparison.bounds import parse_bound

    return tuple(parse_bound(text) for given in texts for text in given.split(","))


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
@click.option("--explain", is_flag=True, help="Why B differs, or each simulator (slow).")
@repeat_option
@timeout_option
@history_option
@click.option(
    *("--fail-if", "bounds"),
    multiple=True,
    metavar="LIMIT",
    callback=_bounds,
    help="Exit 1 if B is worse: p99.ttft=+5%; repeat it.",
)
@click.option("--published", is_flag=True, help="Our errors beside published ones.")
@click.option("--held-out", "unseen", is_flag=True, help="With --published: only what is held out.")
@store_option
def compare_verb(
    sides: tuple[str, ...],
    experiment: str | None,
    coefficients: str | None,
    blis_binary: str | None,
    asked: tuple[str, ...],
    explain: bool,
    repeats: tuple[str, ...],
    timeout_s: float,
    history: Path | None,
    bounds: tuple[Bound, ...],
    published: bool,
    unseen: bool,
    store_path: Path,
) -> int:
    """Two of anything side by side: what differs, by how much, and why.

    A and B are each an experiment (several recordings of one server: old-1,old-2),
    EXPERIMENT@RELEASE, or with --experiment a release or a simulator (embedded, blis).

    --fail-if holds B over A, or the growth of an error, against a limit: exit code 1 if all
    of its 95 % interval is beyond, 3 if a part of it.

    With --simulators, how far each is from every experiment; 4 if none answered.

    \b
    Examples:
      blis-replay compare old.yaml new.yaml --experiment 34b-general
      blis-replay compare old-1,old-2 new-1,new-2 --fail-if p99.ttft=+5%
      blis-replay compare --history history.jsonl --fail-if e2e=+2%
      blis-replay compare 7b-train --simulators embedded,floor:line -o board.md
      blis-replay compare --published --held-out
    """
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.validate.comparison.named_sides import Choice

    if bounds and (asked or published):
        raise click.UsageError("--fail-if goes with A and B, or with --history; leave other choices out")
    if asked:
        if published or unseen or experiment:
            raise click.UsageError("--simulators goes with experiments alone; leave other choices out")
        board = needed_addon("compare", "simulators", "--simulators")
        options = {"explain": explain, "coefficients": coefficients, "blis_binary": blis_binary, "timeout_s": timeout_s}
        return print_answer(board(store_path, sides, asked, repeats=repeats, **options))
    if repeats:
        raise click.UsageError("--repeat goes with --simulators; write several recordings of a side as old-1,old-2")
    if history is not None:
        if published or experiment:
            raise click.UsageError("--history goes with experiments alone; leave other choices out")
        from blis_replay.validate.history import history_of, read
        from blis_replay.validate.history_text import history_answer

        return print_answer(history_answer(str(history), history_of(read(history), sides), bounds), "history")
    if unseen and not published:
        raise click.UsageError("--held-out goes with --published; name both")
    if (len(sides) == 2) == published or len(sides) not in (0, 2):
        raise click.UsageError("name two sides, A and B; or use --simulators or --published")
    if published:
        beside = needed_addon("compare", "published", "--published")
        return print_answer(beside(store_path, coefficients, unseen=unseen))
    with open_for_reading(store_path) as store:
        choice = Choice(experiment, coefficients, blis_binary)
        return print_answer(_two(store, sides, choice, bounds, explain=explain))


def _two(
    store: Store,
    names: tuple[str, ...],
    choice: Choice,
    bounds: tuple[Bound, ...],
    *,
    explain: bool,
) -> Answer:
    from blis_replay.base.errors import NothingToJudgeError
    from blis_replay.replay.simulator import EmbeddedEngine
    from blis_replay.validate.comparison.differences import differences, differences_answer
    from blis_replay.validate.comparison.named_sides import sides_of
    from blis_replay.validate.comparison.pages import below_verdicts
    from blis_replay.validate.comparison.repeats import refuse_copies
    from blis_replay.validate.comparison.validated import judged_replay

    (a, *others_a), (b, *others_b) = (sides_of(store, name, choice) for name in names)
    judged = []
    for run in filter(None, (a.run, b.run)):
        with suppress(NothingToJudgeError):  # of an arrival trace
            own = EmbeddedEngine(run.release) if run.simulator == EmbeddedEngine.name else None
            judged.append(judged_replay(store, run, own))
    for first, others in ((a, others_a), (b, others_b)):
        for i, side in enumerate(others):
            refuse_copies(side.recording, [one.recording for one in (first, *others[:i])])
    compared = differences(a, b, (others_a, others_b))
    answer = differences_answer(compared, bounds)
    if (explain or choice.coefficients or answer.exit_code == 1) and a.run is None and b.run is None:
        answer = _why(compared, answer, choice.coefficients, bounds)
    return below_verdicts(answer, judged)


def _why(compared: Differences, answer: Answer, coefficients: str | None, bounds: tuple[Bound, ...]) -> Answer:
    """The answer with what the difference of two recordings comes from, if that can be said."""
    from blis_replay.base.errors import ExperimentError
    from blis_replay.validate.comparison.bounds import parse_bound
    from blis_replay.validate.experiment import release_for
    from blis_replay.validate.explain.between import why_different, with_why

    a, b = compared.a.recording, compared.b.recording
    names = {one.cell: one.name for one in (*bounds, *map(parse_bound, ("e2e=0%", "ttft=0%", "itl=0%")))}
    errors = {(m, s): compared.comparison.metrics[m][s].error for m, s in names}
    changes = {cell: error for cell, error in errors.items() if error is not None}
    try:
        why = why_different(a, b, release_for(coefficients, [a.slug, b.slug]), changes)
    except ExperimentError as error:
        said = f"{printable(str(error))}; a release of your own: --coefficients FILE"
        click.echo(f"why they differ is not known: {said}", err=True)
        return answer
    return with_why(answer, why, names)
