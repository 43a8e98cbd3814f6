"""Requests rebuilt from a server's counters: how many came, had a first token, and ended between two samples.

Requests begin in the order in which they came (FCFS), and those that end have been sent their mean E2E before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.readers.documents import US_PER_S

SUCCESS, FAILURES = "request_success_total", "request_success_total of failed ones"
FIRST_TOKENS, ENDS = "time_to_first_token_seconds", "e2e_request_latency_seconds"
# Counted with the first token, and at the end.
PROMPTS, OUTPUTS = "prompt_tokens_total", "request_generation_tokens"
# Prompt tokens that were found in a prefix cache; the first is of newer releases, the second also counts those of
# preempted requests that come back.
CACHED = ("prompt_tokens_cached_total", "prefix_cache_hits_total")
RUNNING, WAITING = "num_requests_running", "num_requests_waiting"
_SEED = 46
# Median of the square of a normal number.
_MEDIAN_SQUARE = 0.4549


@dataclass(frozen=True)
class _Events:
    """Events in the order in which they were counted, arrays of one length.

    ``sample``: after which sample each was counted.  ``mean``: the mean value of those that were counted together.
    """

    sample: Int64s
    mean: Floats

    def part(self, chosen: slice) -> _Events:
        """Some of the events."""
        return _Events(self.sample[chosen], self.mean[chosen])

    def tokens(self, chosen: slice | Int64s, count: int, random: np.random.Generator) -> Int64s:
        """int64[count]: ``chosen`` values as lengths of requests; the mean of all for those that were not counted.

        Those that were counted together keep their mean.  How far single ones lie from it, the means of neighbours say:
        those of k values differ by a k-th of the variance of a value.
        """
        _, first, group, size = np.unique(self.sample, return_index=True, return_inverse=True, return_counts=True)
        apart = np.diff(self.mean[first]) ** 2 / (1 / size[1:] + 1 / size[:-1])
        deviation = float(np.sqrt(np.median(apart) / _MEDIAN_SQUARE)) if len(apart) else 0.0
        off = random.uniform(-np.sqrt(3), np.sqrt(3), len(group))  # of variance 1
        own = self.mean + deviation * (off - (np.bincount(group, off) / size)[group])
        lengths, known = np.full(count, self.mean.mean()), own[chosen][:count]
        lengths[: len(known)] = known
        tokens: Int64s = np.rint(lengths).astype(np.int64)
        return tokens


def _events(counter: Floats, total: Floats) -> _Events:
    """Events that ``counter`` counts, with values whose sum ``total`` is, both at each sample."""
    counts = np.rint(np.diff(counter)).astype(np.int64)
    sample = np.repeat(np.arange(len(counts)), counts)
    return _Events(sample, (np.diff(total) / np.maximum(counts, 1))[sample])


def came(at: Mapping[str, Floats]) -> Floats:
    """float64[samples]: requests that had come by each sample: those that ended and those in flight.

    The server sets counters and gauges one after the other, so the sum may fall for a moment.
    """
    counted: Floats = np.maximum.accumulate(_counted(at))
    return counted


def lost(at: Mapping[str, Floats]) -> float:
    """Requests that left without being served: those that failed, and those that nothing counted."""
    uncounted = float((came(at) - _counted(at)).max())
    return float(np.ptp(at[FAILURES])) + uncounted if FAILURES in at else uncounted


def _counted(at: Mapping[str, Floats]) -> Floats:
    return at[SUCCESS] + at.get(FAILURES, 0.0) + at[RUNNING] + at[WAITING]


def rebuilt_requests(times_s: Floats, at: Mapping[str, Floats], stale_s: float) -> pl.DataFrame:
    """Requests that came between samples ``at`` these times: ``sent_us``, ``prompt_tokens``, ``output_tokens``.

    ``cached_prompt_tokens``: where the server counts them.

    Each came between two samples, and its TTFT before its first token, which came between two others.  ``sent_us`` is
    the middle of that time, and ``arrival_within_us`` half of it.  Of requests that were counted together only the mean
    TTFT and the mean lengths are known.  ``stale_s``: how old a sample may be.
    """
    random = np.random.default_rng(_SEED)
    sample = _events(came(at), came(at)).sample
    count, waiting, in_flight = len(sample), int(at[WAITING][0]), int(at[RUNNING][0] + at[WAITING][0])

    first_tokens = at[f"{FIRST_TOKENS}_count"]
    begun = _events(first_tokens, at[f"{FIRST_TOKENS}_sum"]).part(slice(waiting, waiting + count))
    some = slice(len(begun.sample))
    low_s, high_s = times_s[sample] - stale_s, times_s[sample + 1]
    by_ttft_s = np.maximum(low_s[some], times_s[begun.sample] - stale_s - begun.mean)
    before_s = np.minimum(high_s[some], times_s[begun.sample + 1] - begun.mean)
    agree = by_ttft_s < before_s
    low_s[some], high_s[some] = np.where(agree, by_ttft_s, low_s[some]), np.where(agree, before_s, high_s[some])

    ended = _events(at[f"{ENDS}_count"], at[f"{ENDS}_sum"])
    by_send = np.argsort((times_s[ended.sample] + times_s[ended.sample + 1]) / 2 - ended.mean, kind="stable")
    outputs = _events(at[f"{OUTPUTS}_count"], at[f"{OUTPUTS}_sum"])
    columns = {
        "sent_us": ((low_s + high_s) / 2 * US_PER_S).astype(np.int64),
        "arrival_within_us": ((high_s - low_s) / 2 * US_PER_S).astype(np.int64),
        "output_tokens": np.maximum(outputs.tokens(by_send[by_send < len(outputs.mean)][in_flight:], count, random), 1),
    }
    found = [name for name in CACHED if name in at][:1]
    for name, counter in zip(("prompt_tokens", "cached_prompt_tokens"), (PROMPTS, *found), strict=False):
        tokens = _events(first_tokens, at[counter]).tokens(slice(waiting, None), count, random)
        columns[name] = np.clip(tokens, 0, columns.get("prompt_tokens"))
    columns["prompt_tokens"] = np.maximum(columns["prompt_tokens"], 1)
    return pl.DataFrame(columns)
