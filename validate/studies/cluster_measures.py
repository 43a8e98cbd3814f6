"""What is measured of a run of a cluster, pooled over its instances."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster.simulate import REFUSED, ClusterResult
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import RequestTrace
from blis_replay.validate.metrics import statistics

MEASURES = (
    "requests",
    "admitted",
    "completed",
    "unserved",
    "ttft_mean_ms",
    "ttft_p99_ms",
    "e2e_mean_ms",
    "e2e_p99_ms",
    "decode_mean_ms",
    "output_tokens_per_s",
    "preemptions_per_request",
    "prefix_hit_share",
    "computed_prefill_tokens",
    "fetched_blocks",
    "jain_index",
    "gap_mean_ms",
    "gap_cv",
    "gap_ks_distance",
    "counted_completed",
    "counted_in_system",
    "counted_lost",
    "differing_arrays",
)


def measures(trace: RequestTrace, result: ClusterResult, counted_at_s: float | None) -> dict[str, float]:
    """All of ``MEASURES`` by name; nan where a run does not give one.

    ``unserved``: admitted and not completed.  ``decode_mean_ms``: first to last token.  ``prefix_hit_share``: prompt
    tokens found in the cache at the first admission, of all admitted.  ``computed_prefill_tokens``: of all steps, what
    is computed again after a preemption included.  ``fetched_blocks``: from the CPU tier.
    ``jain_index``: ``(sum x)^2 / (n sum x^2)`` of the requests that each instance completed (Jain, Chiu, Hawe 1984).
    ``gap_*``: of arrivals: mean, standard deviation over mean, and the Kolmogorov-Smirnov distance from an
    exponential law of that mean.  ``counted_*``: see ``counted``.
    """
    done, admitted = result.completed, result.instance != REFUSED
    ttft, e2e = statistics(result.ttft_us[done]), statistics(result.e2e_us[done])
    cached = sum(int(run.cached_tokens[run.completed].sum()) for run in result.instances)
    prompts = int(trace.prompt_tokens[admitted].sum())
    last_us = int((trace.arrival_us + result.e2e_us)[done].max(initial=1))
    found = dict.fromkeys(MEASURES, float("nan"))
    found |= {
        "requests": float(len(trace)),
        "admitted": float(admitted.sum()),
        "completed": float(done.sum()),
        "unserved": float(admitted.sum() - done.sum()),
        "ttft_mean_ms": ttft["mean"] / 1000,
        "ttft_p99_ms": ttft["p99"] / 1000,
        "e2e_mean_ms": e2e["mean"] / 1000,
        "e2e_p99_ms": e2e["p99"] / 1000,
        "decode_mean_ms": float((result.e2e_us - result.ttft_us)[done].mean()) / 1000,
        "output_tokens_per_s": float(trace.output_tokens[done].sum() / (last_us - trace.arrival_us[0]) * 1e6),
        "preemptions_per_request": sum(int(run.preemptions.sum()) for run in result.instances) / int(admitted.sum()),
        "prefix_hit_share": cached / prompts,
        "computed_prefill_tokens": float(sum(int(run.steps["prefill_tokens"].sum()) for run in result.instances)),
        "fetched_blocks": float(sum(run.fetched_blocks for run in result.instances)),
        "jain_index": jain_index([int(run.completed.sum()) for run in result.instances]),
        **arrival_gaps(trace),
    }
    if counted_at_s is not None:
        found |= counted(result, int(counted_at_s * 1e6))
    return found


def jain_index(shares: list[int]) -> float:
    """1 if all are equal, 1 / n if one has everything."""
    values = np.array(shares, np.float64)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def arrival_gaps(trace: RequestTrace) -> dict[str, float]:
    """How far the gaps between arrivals are from those of a Poisson process."""
    gaps = np.sort(np.diff(trace.arrival_us, prepend=0)).astype(np.float64)
    law = 1 - np.exp(-gaps / gaps.mean())
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    distance = max(float(np.abs(law - ranks[:-1]).max()), float(np.abs(law - ranks[1:]).max()))
    return {
        "gap_mean_ms": float(gaps.mean()) / 1000,
        "gap_cv": float(gaps.std() / gaps.mean()),
        "gap_ks_distance": distance,
    }


def counted(result: ClusterResult, at_us: int) -> dict[str, float]:
    """Who is where at a moment, told twice.

    ``counted_completed``: requests whose last token is in.  ``counted_in_system``: queued or running, by the depths
    in the tables of steps.  ``counted_lost``: requests that have reached a queue and are neither of the two.
    """
    completed = in_system = lost = 0
    for run in result.instances:
        done = int((run.completed & (run.finished_us <= at_us)).sum())
        inside = in_system_by_steps(run, at_us)
        completed += done
        in_system += inside
        lost += abs(int((run.queued_us <= at_us).sum()) - done - inside)
    return {
        "counted_completed": float(completed),
        "counted_in_system": float(in_system),
        "counted_lost": float(lost),
    }


def in_system_by_steps(run: SimResult, at_us: int) -> int:
    """Requests queued or running, from the depths after the last schedule, who came since, and who finished since."""
    begun = int(np.searchsorted(run.steps["scheduled_us"], at_us, side="right"))
    if begun == 0:
        return int((run.queued_us <= at_us).sum())
    last = run.steps[begun - 1]
    since_us = int(last["scheduled_us"])
    came = int(((run.queued_us > since_us) & (run.queued_us <= at_us)).sum())
    ended = run.steps[:begun]
    left: NDArray[np.bool_] = (ended["end_us"] > since_us) & (ended["end_us"] <= at_us)
    return int(last["waiting_depth"]) + int(last["running_depth"]) + came - int(ended["finished"][left].sum())


def differing_arrays(one: ClusterResult, other: ClusterResult) -> float:
    """How many arrays of two results are not equal to the byte."""
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (one.instance, other.instance),
        (one.ttft_us, other.ttft_us),
        (one.e2e_us, other.e2e_us),
    ]
    pairs += [(a.steps, b.steps) for a, b in zip(one.instances, other.instances, strict=True)]
    pairs += [(a.segments, b.segments) for a, b in zip(one.instances, other.instances, strict=True)]
    return float(sum(a.tobytes() != b.tobytes() for a, b in pairs))
