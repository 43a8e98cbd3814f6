"""What ``blis-replay compare --simulators`` and ``--published`` answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from blis_replay.ingest.store import open_for_reading
from blis_replay.replay.simulators import SimulatorInputs
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.comparison.repeats import repeats_of
from blis_replay.validate.experiment import named_experiments, release_for
from blis_replay.validate.text.answer import Answer
from blis_replay_labs.board.cost import cost_of
from blis_replay_labs.board.leaderboard import joined, leaderboard
from blis_replay_labs.board.leaderboard_text import leaderboard_answer
from blis_replay_labs.board.published import compare_published, held_out, published_answer
from blis_replay_labs.board.simulators import contestants


def simulators(
    store_path: Path,
    names: Sequence[str],
    asked: Sequence[str],
    *,
    repeats: Sequence[str] = (),
    explain: bool,
    coefficients: str | None,
    blis_binary: str | None,
    timeout_s: float,
) -> Answer:
    """The board of simulators (``asked``: see ``contestants``) on experiments, all of them if none is named.

    ``repeats``: as ``repeats_of``.
    """
    every = any("all" in one.split(",") for one in asked)
    with open_for_reading(store_path) as store:
        slugs = named_experiments(store, names or None)
        repeated = repeats_of(store, slugs, repeats)
    # Each experiment gets the release that ships for it, unless one is named for all.
    releases = {slug: release_for(coefficients, [slug]) for slug in slugs}
    boards = []
    for name in dict.fromkeys(release.name for release in releases.values()):
        of_it = [slug for slug in slugs if releases[slug].name == name]
        release = releases[of_it[0]]
        release.refuse_if_invalid()
        found, absent = contestants(asked, SimulatorInputs(release, store_path, timeout_s, blis_binary))
        say = partial(cost_of, release=release) if explain else None
        with progress_line("replaying") as progress, open_for_reading(store_path) as store:
            replayed = partial(leaderboard, store, of_it, found, absent, repeated=repeated)
            boards.append(replayed(published=every, explain=say, progress=progress))
    return leaderboard_answer(joined(boards))


def published(store_path: Path, coefficients: str | None, *, unseen: bool) -> Answer:
    """Our errors beside published ones; ``unseen``: only where our coefficients were not fitted."""
    with open_for_reading(store_path) as store, progress_line("replaying") as progress:
        compared = compare_published(store, release_for(coefficients), progress)
    return published_answer(held_out(compared) if unseen else compared)
