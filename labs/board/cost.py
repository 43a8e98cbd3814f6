"""What costs another simulator most: our engine imitates its answers, and the imitation is taken apart.

The inside of another simulator is closed, but its answers can be read like a recording.  Features that it says it does
not model are switched off in our engine.  Then step time, delays and, if those do not suffice, one engine argument are
fitted to its answers.  Setting each of these back to the recording and the coefficients gives its Shapley share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows, rows_of
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.attribute import Subset, all_subsets, shapley_weights
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.inputs import to_try
from blis_replay.validate.explain.search import best_input
from blis_replay.validate.explain.trial import Fit, Trial, trial_of, with_costs
from blis_replay_labs.board.leaderboard import Cost

STEP_TIME, DELAYS = "step time", "delays"
_METRICS = ("e2e", "ttft")


def cost_of(run: ReplayRun, release: CoefficientRelease) -> Cost:
    """What costs the simulator of a run most, beside the engine here with a release.

    Raises ``ReleaseError`` if the release has no coefficients for the recording, ``NothingToJudgeError`` if the run has
    too few requests to imitate.
    """
    replayed = Replayed(run.recording, run.mode, entry_of(release, run.recording), release)
    found = _imitation(replace(replayed, recording=answered(run)), _declared(run))
    if found is None:
        raise NothingToJudgeError(f"{run.recording.alias}: too few requests to tell what costs {run.simulator} most")
    parts = _Parts(replayed, found)
    values = {subset: parts.means_us(subset) for subset in all_subsets(len(parts.names))}
    own_us = values[frozenset(range(len(parts.names)))]
    shares = -np.tensordot(shapley_weights(len(parts.names)), np.stack(list(values.values())), 1) / own_us
    return Cost(
        shares={name: (float(e2e), float(ttft)) for name, (e2e, ttft) in zip(parts.names, shares, strict=True)},
        left=found.fitted.left,
        evidence=parts.evidence(),
        tried=None if found.tried is None else found.tried.name,
        also=() if found.tried is None else found.tried.also,
    )


def answered(run: ReplayRun) -> Recording:
    """The recording as if the simulator had been the server: its latencies, and the stamps that it reports."""
    recording, simulated = run.recording, run.simulated
    known = simulated.completed
    ttft_us, e2e_us = (np.where(known, values, 0) for values in (run.ttft_us, run.e2e_us))
    nothing: pl.Expr | pl.Series = pl.lit(None, pl.Int64)
    queue, prefill, decode = nothing, nothing, nothing
    if simulated.scheduled_us is not None:
        queue = pl.Series(simulated.scheduled_us)
        prefill, decode = pl.Series(ttft_us - simulated.scheduled_us), pl.Series(e2e_us - ttft_us)
    requests = recording.requests.frame().with_columns(
        ttft_us=pl.Series(ttft_us),
        e2e_us=pl.Series(e2e_us),
        status=pl.when(pl.Series(known)).then(pl.lit("ok")).otherwise(pl.col("status")),
        queue_us=queue,
        prefill_us=prefill,
        decode_us=decode,
    )
    return replace(
        recording,
        requests=rows_of(requests),
        token_events=None,
        steps=no_rows(STEP_SCHEMA),
        lifecycles=no_rows(LIFECYCLE_SCHEMA),
        journey_events=no_rows(JOURNEY_EVENT_SCHEMA),
        findings=(),
    )


# Word in a simulator's "does not model" -> our component that is switched off.
_DECLARED = {"prefix": "prefix cache", "asynchronous": "scheduling mode"}


def _declared(run: ReplayRun) -> tuple[Hypothesis, ...]:
    """Features of the recording that the simulator says it does not model, if our engine can switch them off."""
    said = " ".join(text.partition("does not model: ")[2].lower() for text in run.simulated.differences)
    lacked = {name for word, name in _DECLARED.items() if word in said}
    off = [one for one in to_try(run.recording, run.mode)[0] if one.name in lacked]
    return tuple(one for one in off if not any(one.engine.values()))


@dataclass(frozen=True)
class _Imitation:
    """What makes our engine answer like the simulator.

    ``declared``: features that the simulator says it lacks.  ``tried``: another input, where coefficients alone do
    not suffice.
    """

    fitted: Fit
    declared: tuple[Hypothesis, ...]
    tried: Hypothesis | None

    @property
    def inputs(self) -> tuple[Hypothesis, ...]:
        return (*self.declared, *(() if self.tried is None else (self.tried,)))


def _imitation(replayed: Replayed, declared: tuple[Hypothesis, ...]) -> _Imitation | None:
    """Fit step time and delays to the answers of a recording, and one input if it takes one; None of too few requests.

    Raises what planning a replay of the recording raises.
    """
    lacking = replayed.put_right(declared)
    trial = trial_of(lacking)
    if trial is None:
        return None
    best = best_input(trial, to_try(lacking.recording, lacking.mode))
    tried = None if best is None else best.hypothesis
    if tried is not None and tried.name in {one.name for one in declared}:
        # The imitation is better with a feature that the simulator says it lacks.
        return _imitation(lacking.put_right([tried]), tuple(one for one in declared if one.name != tried.name))
    if tried is not None:
        trial = Trial(lacking.put_right([tried]), trial.target)
    return _Imitation(trial.fit(), declared, tried)


@dataclass(frozen=True)
class _Parts:
    """The imitation, and the components that can be set back."""

    replayed: Replayed
    found: _Imitation

    @property
    def names(self) -> tuple[str, ...]:
        return (*(one.name for one in self.found.inputs), DELAYS, STEP_TIME)

    def means_us(self, put_back: Subset) -> Floats:
        """float64[2]: mean E2E and TTFT of the imitation in us, with these of the names set back."""
        return np.array([getattr(self.run(put_back), f"{metric}_us").mean() for metric in _METRICS])

    def run(self, put_back: Subset) -> SimResult:
        back = {self.names[i] for i in put_back}
        entry, imitated = self.replayed.entry, self.imitated
        latency = (entry if STEP_TIME in back else imitated).latency
        lifecycle = (entry if DELAYS in back else imitated).lifecycle
        changed = self.replayed.put_right(one for one in self.found.inputs if one.name not in back)
        plan = plan_replay(changed.recording, changed.mode, entry)
        return simulate(plan.trace, plan.engine, plan.latency(latency), lifecycle)

    @property
    def imitated(self) -> ModelEntry:
        return with_costs(self.replayed.entry, self.found.fitted.at)

    def evidence(self) -> dict[str, str]:
        """One sentence per component: its value in the imitation, and the value that it should have."""
        said = {one.name: "it says that it does not model this" for one in self.found.declared}
        if self.found.tried is not None:
            said[self.found.tried.name] = _input_evidence(self.replayed.recording, self.found.tried)
        imitated, entry = self.imitated, self.replayed.entry
        first, then = imitated.lifecycle, entry.lifecycle
        said[DELAYS] = (
            f"before the queue {first.pre_queue_us / 1000:.1f} ms for {then.pre_queue_us / 1000:.1f} ms, "
            f"after the last token {first.post_request_us / 1000:.1f} ms for {then.post_request_us / 1000:.1f} ms"
        )
        batches = _typical(self.run(frozenset(range(len(self.names)))))
        ms = [durations_us(entry.latency, batches) / 1000 for entry in (imitated, entry)]
        without, mixed = batches[0], batches[1]
        said[STEP_TIME] = (
            f"a step of {without['decode_tokens']} decodes {ms[0][0]:.1f} ms for {ms[1][0]:.1f} ms, "
            f"with {mixed['prefill_tokens']} prefill tokens too {ms[0][1]:.1f} ms for {ms[1][1]:.1f} ms"
        )
        return said


def _input_evidence(recording: Recording, tried: Hypothesis) -> str:
    told = {name: recording.engine[name].value if name in recording.engine else None for name in tried.engine}
    changed = [
        f"{name} {_shown(value)}" + ("" if told[name] is None else f" for {_shown(told[name])}")
        for name, value in tried.engine.items()
    ]
    changed += [f"{name}={value}" for name, value in tried.mode.items()]
    return f"it answers like an engine with {', '.join(changed)}; {tried.basis.removeprefix('not recorded; tried: ')}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typical(result: SimResult) -> list[dict[str, int]]:
    """The mean batch with no prefill, and the mean batch with some, of layers that attend to all of a context."""
    steps = result.steps
    prefill = steps["prefill_tokens"] > 0
    mean = {name: round(float(steps[name].mean())) for name in ("decode_tokens", "context_tokens")}
    some = round(float(steps["prefill_tokens"][prefill].mean())) if prefill.any() else 1
    return [mean, mean | {"prefill_tokens": some, "prefill_requests": 1}]
