"""What a simulator may be told wrong of its server: alternatives that are tried, one after the other.

Each alternative is another engine argument, another use of the prefix cache, other lengths.  All of them are given
the same chance: step time and delays are fitted anew beside each (``fit_through``), so that an alternative wins only
by what no step time and no delay can do, request by request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import CorrectedModel, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.compiled.arrays import Bools, Floats, Int64s
from blis_replay.compiled.errors import ExperimentError
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed.cycles import server_stamps
from blis_replay.replay.plan import plan_replay, with_engine
from blis_replay.validate.metrics.observed import observed_requests

# A trial looks at so many requests: enough to tell, few enough to be tried a hundred times.
_MOST_REQUESTS = 2_000
# An alternative must leave at most this share of what step time and delays alone leave, and so much less in all.
_LEAVES, _BETTER_BY = 0.6, 0.01
# Alternatives that leave as little as the best, give or take so much, explain it equally well.
_EQUAL_SHARE, _EQUAL = 1.3, 0.004
_ITERATIONS = 3
# What is fitted, and by how much each is moved to see what it does: us, and ns for the line in the batch.
_STEPS = np.array([300_000.0, 2_000.0, 20_000.0, 20.0, 1_500.0, 60.0, 1_500.0])


@dataclass(frozen=True)
class Alternative:
    """Another input of a replay.

    ``name``: of the component.  ``why``: half a sentence that explains the error.  ``mend``: what to do.
    ``decides``: the measurement that would tell it from others.  ``engine``, ``mode``: the changes.
    """

    name: str
    why: str
    mend: str
    decides: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    mode: Mapping[str, Any] = field(default_factory=dict)

    def of(self, recording: Recording) -> Recording:
        """The recording with the engine arguments of this alternative."""
        return with_engine(recording, self.engine, "tried") if self.engine else recording


@dataclass(frozen=True)
class Tried:
    """``best``: the alternative that explains what no step time and no delay does; ``equal``: those that do it as well.

    ``left``: the misfit that remains with it, ``before``: with the inputs as told, both relative to the latencies.
    """

    best: Alternative
    equal: tuple[Alternative, ...]
    before: float
    left: float


@dataclass(frozen=True)
class _Target:
    """What was observed of the requests ``chosen`` (bool[n]): float64[marks, m] us, nan where not recorded.

    Each row is a part of the way of a request; ``scale_us``: what a difference in it is measured by.
    """

    chosen: Bools
    observed_us: Floats
    scale_us: Floats
    stamped: bool


def best_alternative(recording: Recording, mode: ReplayMode, entry: ModelEntry) -> Tried | None:
    """The alternative that explains best what the requests had otherwise than simulated; None if none is needed.

    Raises what planning a replay of the recording raises.
    """
    if isinstance(entry.latency, ObservedCycles | CorrectedModel):
        return None
    target = _target(recording)
    if target is None:
        return None
    before = fit_through(recording, mode, entry, target)
    if before.left < _BETTER_BY:
        return None
    left: list[tuple[float, Alternative]] = []
    for alternative in alternatives(recording, mode):
        try:
            fitted = fit_through(alternative.of(recording), replace(mode, **alternative.mode), entry, target)
        except ExperimentError:
            continue
        left.append((fitted.left, alternative))
    if not left:
        return None
    least, best = min(left, key=lambda pair: pair[0])
    if least > _LEAVES * before.left or before.left - least < _BETTER_BY:
        return None
    equal = [(value, other) for value, other in left if value <= _EQUAL_SHARE * least + _EQUAL]
    others = {other.name: other for _, other in sorted(equal, key=lambda pair: pair[0]) if other.name != best.name}
    return Tried(best, tuple(others.values()), before.left, least)


def alternatives(recording: Recording, mode: ReplayMode) -> Iterator[Alternative]:
    """All that is tried for a recording, replayed in a mode."""
    told = {name: setting.value for name, setting in recording.engine.items()}
    yield from _switches(told, mode)
    for name, values in _values(recording, told).items():
        for value in values:
            if value != told.get(name):
                yield _argument(name, value, told.get(name))
    lengths = recording.requests["output_tokens_reported"]
    if (
        mode.lengths == "true"
        and not lengths.null_count()
        and not (lengths == recording.requests["output_tokens"]).all()
    ):
        yield Alternative(
            "output lengths",
            "its requests do not decode as many tokens as the server did",
            "record server usage (stream_options include_usage)",
            "server usage of each request",
            mode={"lengths": "re-tokenised"},
        )


def _switches(told: Mapping[str, Any], mode: ReplayMode) -> Iterator[Alternative]:
    running = bool(told.get("async_scheduling", True))
    if mode.scheduling == "recorded":
        other = "synchronous" if running else "asynchronous"
        why = f"it schedules {'asynchronously' if running else 'synchronously'}, and the server {other}ly"
        mend = f"tell it: async_scheduling: {str(not running).lower()} in a file for blis-replay ingest --engine"
        decides = "journeys (from scheduled to first token), or the server's start-up log"
        yield Alternative("scheduling mode", why, mend, decides, engine={"async_scheduling": not running})
    if mode.prefix == "recorded":
        caching = bool(told.get("enable_prefix_caching", True))
        had = "it finds prompts in a prefix cache, and the server computed them whole"
        lacked = "it computes prompts whole that the server had in its prefix cache"
        mend = f"tell it: enable_prefix_caching: {str(not caching).lower()} in a file for blis-replay ingest --engine"
        decides = "prompt tokens computed (step records), or cached tokens in the server's usage"
        changed = {"enable_prefix_caching": not caching}
        yield Alternative("prefix cache", had if caching else lacked, mend, decides, engine=changed)
    if told.get("enable_chunked_prefill", True):
        yield _argument("enable_chunked_prefill", False, True)


_DECIDES = {
    "max_num_seqs": "running and waiting depth (step records or /metrics)",
    "max_num_batched_tokens": "tokens a step (step records)",
    "long_prefill_token_threshold": "tokens a step (step records)",
    "num_gpu_blocks": "KV blocks in all (step records, or the server's start-up log)",
    "enable_chunked_prefill": "the server's start-up log",
}


def _argument(name: str, value: int | bool, told: object) -> Alternative:
    shown = str(value).lower() if isinstance(value, bool) else f"{value:,}"
    has = "no bound" if told is None else str(told).lower() if isinstance(told, bool) else f"{told:,}"
    label = "KV blocks" if name == "num_gpu_blocks" else name
    why = f"it has {label} {has}, and the server {'about ' if label == 'KV blocks' else ''}{shown}"
    mend = f"look it up and tell it: {name}: {str(value).lower()} in a file for blis-replay ingest --engine"
    return Alternative(label, why, mend, _DECIDES[name], engine={name: value})


def _values(recording: Recording, told: Mapping[str, Any]) -> dict[str, list[int]]:
    """What is tried of each argument: what was seen in the steps, else values on a ladder."""
    requests, steps = recording.requests, recording.steps
    needed = int((requests["prompt_tokens"].fill_null(0) + requests["output_tokens"].fill_null(0)).max() or 1)  # type: ignore[arg-type]
    seqs = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024]
    batched = [128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384]
    thresholds = [0, 64, 128, 256, 512, 1024, 2048]
    block = int(told.get("block_size", 16))
    least = -(-needed // block) + 2
    blocks = sorted({round(least * 1.15**i) for i in range(28)})
    if not steps.is_empty():
        seen = steps.aggregate(
            depth="max(running_depth)", tokens="max(prefill_tokens + decode_tokens)", blocks="max(kv_blocks_total)"
        )
        seqs = [int(seen["depth"])] if seen["depth"] else seqs
        batched = [value for value in batched if not seen["tokens"] or value >= 0.9 * int(seen["tokens"])]
        blocks = [int(seen["blocks"]) + 1] if seen["blocks"] else blocks
    budget = int(told.get("max_num_batched_tokens", 2048))
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": batched,
        "long_prefill_token_threshold": [value for value in thresholds if value < budget],
        "num_gpu_blocks": blocks,
    }


@dataclass(frozen=True)
class Fitted:
    """Step time and delays fitted through the simulator.

    ``left``: mean absolute difference that remains, relative to the latencies.  ``line_ns``: added to each step, and
    per prefill, decode and context token.  ``delays_us``: added before the queue, per token and per request after it.
    """

    left: float
    line_ns: tuple[int, int, int, int]
    delays_us: tuple[float, float, float]

    def entry(self, entry: ModelEntry) -> ModelEntry:
        """The coefficients with what was fitted."""
        if isinstance(entry.latency, ObservedCycles | CorrectedModel):
            raise TypeError("observed step times have nothing to fit")
        at, none = np.zeros(1, np.int64), np.zeros(1, np.int64)
        pre, token, request = self.delays_us
        cycle = entry.lifecycle
        lifecycle = replace(
            cycle,
            pre_queue_us=max(cycle.pre_queue_us + pre, 0.0),
            post_token_us=max(cycle.post_token_us + token, 0.0),
            post_request_us=max(cycle.post_request_us + request, 0.0),
        )
        return replace(entry, latency=CorrectedModel(entry.latency, self.line_ns, at, none), lifecycle=lifecycle)


def fit_through(recording: Recording, mode: ReplayMode, entry: ModelEntry, target: _Target) -> Fitted:
    """Fit step time and delays to the observed requests, by a few steps of Gauss and Newton.

    The derivatives are differences of replays.  A simulated time jumps where a request just misses a step, so the
    moves are larger than such a jump.
    """
    plan = plan_replay(recording, mode)
    upto = slice(0, len(target.chosen))
    trace, engine = plan.trace.part(upto), plan.engine
    best_at = np.zeros(len(_STEPS))
    best = _misfit(_difference(trace, engine, entry, best_at, target))
    at, damping = best_at, 1e-3
    for _ in range(_ITERATIONS):
        if best < _BETTER_BY / 4:
            break
        here = _difference(trace, engine, entry, at, target)
        slopes = np.column_stack(
            [_difference(trace, engine, entry, at + move, target) - here for move in np.diag(_STEPS)]
        )
        weight = 1 / np.maximum(np.abs(here), np.median(np.abs(here)) + 1e-4)
        normal = slopes.T @ (slopes * weight[:, None])
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), slopes.T @ (weight * here))
        at = at + move * _STEPS
        value = _misfit(_difference(trace, engine, entry, at, target))
        if value < best:
            best, best_at = value, at
        else:
            at, damping = best_at, damping * 30
    return _fitted(best, best_at)


def _fitted(left: float, at: Floats) -> Fitted:
    a, b, c, d = (round(float(value)) for value in at[:4])
    pre, token, request = (float(value) for value in at[4:])
    return Fitted(left, (a, b, c, d), (pre, token, request))


def _misfit(difference: Floats) -> float:
    return float(np.abs(difference).mean())


def _difference(trace: RequestTrace, engine: EngineConfig, entry: ModelEntry, at: Floats, target: _Target) -> Floats:
    """float64[marks * m]: simulated less observed, relative to the scale; 10 where nothing can be simulated."""
    changed = _fitted(0.0, at).entry(entry)
    try:
        result = simulate(trace, engine, changed.latency, changed.lifecycle)
    except TraceError:
        return np.full(int((~np.isnan(target.observed_us)).sum()), 10.0)
    parts: list[Int64s] = [result.ttft_us, result.e2e_us]
    if target.stamped:
        parts += [
            result.scheduled_us - result.arrival_us,
            result.first_token_us - result.scheduled_us,
            result.finished_us - result.first_token_us,
        ]
    simulated_us = np.stack(parts)[:, target.chosen].astype(np.float64)
    known = ~np.isnan(target.observed_us)
    return ((simulated_us - target.observed_us) / target.scale_us[:, None])[known]


def _target(recording: Recording) -> _Target | None:
    """What was observed of the first requests; None of too few, or where only aggregates are known."""
    chosen = observed_requests(recording)[:_MOST_REQUESTS]
    if int(chosen.sum()) < 20:
        return None
    forbidden = {finding.metric for finding in recording.findings if finding.severity == "unusable"}
    requests = recording.requests.frame(["arrival_us", "ttft_us", "e2e_us"])[: len(chosen)].filter(chosen)
    sent_us, ttft_us, e2e_us = (requests[name].to_numpy().astype(np.float64) for name in requests.columns)
    first_us = np.full(len(ttft_us), np.nan) if "ttft" in forbidden else ttft_us
    rows = [first_us, e2e_us]
    stamps = server_stamps(recording)
    marks = [
        values[: len(chosen)][chosen] for values in (stamps.scheduled_us, stamps.first_token_us, stamps.finished_us)
    ]
    stamped = "segments" not in forbidden and not np.isnan(marks[0]).all()
    if stamped:
        rows += [marks[0] - sent_us, marks[1] - marks[0], marks[2] - marks[1]]
    observed_us = np.stack(rows)
    first, whole = float(np.mean(ttft_us)), float(np.mean(e2e_us))
    scale_us = np.array([first, whole, first, first, whole][: len(rows)])
    return _Target(chosen, observed_us, scale_us, stamped)
