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

SUCCESS, FIRST_TOKENS, ENDS = "request_success_total", "time_to_first_token_seconds", "e2e_request_latency_seconds"
# Counted with the first token, and at the end.
PROMPTS, OUTPUTS = "prompt_tokens_total", "request_generation_tokens"
RUNNING, WAITING = "num_requests_running", "num_requests_waiting"
_SEED = 46
# Share: lengths of requests that were counted together lie this far on either side of their mean.
_SPREAD = 0.1


@dataclass(frozen=True)
class _Events:
    """Events in the order in which they were counted, arrays of one length.

    ``sample``: after which sample each was counted.  ``mean``: the mean value of those that were counted together;
    ``alone``: whether it was the only one, so that this is its own value.
    """

    sample: Int64s
    mean: Floats
    alone: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def part(self, chosen: slice | Int64s) -> _Events:
        """Some of the events, or all in another order."""
        return _Events(self.sample[chosen], self.mean[chosen], self.alone[chosen])

    def tokens(self, count: int, random: np.random.Generator) -> Int64s:
        """int64[count]: the values as lengths of requests; the mean of all for those that were not counted."""
        lengths, spread = np.full(count, self.mean.mean()), np.full(count, _SPREAD)
        some = slice(min(count, len(self.mean)))
        lengths[some], spread[some] = self.mean[some], np.where(self.alone[some], 0, _SPREAD)
        tokens: Int64s = np.maximum(np.rint(lengths * random.uniform(1 - spread, 1 + spread)), 1).astype(np.int64)
        return tokens


def _events(counter: Floats, total: Floats) -> _Events:
    """Events that ``counter`` counts, with values whose sum ``total`` is, both at each sample."""
    counts = np.rint(np.diff(counter)).astype(np.int64)
    sample = np.repeat(np.arange(len(counts)), counts)
    return _Events(sample, (np.diff(total) / np.maximum(counts, 1))[sample], counts[sample] == 1)


def came(at: Mapping[str, Floats]) -> Floats:
    """float64[samples]: requests that had come by each sample: those that ended and those in flight."""
    return at[SUCCESS] + at[RUNNING] + at[WAITING]


def rebuilt_requests(times_s: Floats, at: Mapping[str, Floats]) -> pl.DataFrame:
    """Requests that came between samples ``at`` these times: ``sent_us``, ``prompt_tokens`` and ``output_tokens``.

    Each came between two samples, and its TTFT before its first token, which came between two others; a single one is
    placed in the middle.  Nothing more is known of requests that were counted together, so their times are uniform and
    their lengths spread around their mean.
    """
    random = np.random.default_rng(_SEED)
    arrivals = np.maximum.accumulate(came(at))
    sent = _events(arrivals, arrivals)
    sample = sent.sample
    count, waiting, in_flight = len(sample), int(at[WAITING][0]), int(came(at)[0] - at[SUCCESS][0])

    first_tokens = at[f"{FIRST_TOKENS}_count"]
    begun = _events(first_tokens, at[f"{FIRST_TOKENS}_sum"]).part(slice(waiting, waiting + count))
    some = slice(len(begun.sample))
    low_s, high_s = times_s[sample], times_s[sample + 1]
    by_ttft_s = np.maximum(low_s[some], times_s[begun.sample] - begun.mean)
    before_s = np.minimum(high_s[some], times_s[begun.sample + 1] - begun.mean)
    agree = by_ttft_s < before_s
    low_s[some], high_s[some] = np.where(agree, by_ttft_s, low_s[some]), np.where(agree, before_s, high_s[some])

    share = np.where(sent.alone, 0.5, random.random(count))

    ended = _events(at[f"{ENDS}_count"], at[f"{ENDS}_sum"])
    by_send = np.argsort((times_s[ended.sample] + times_s[ended.sample + 1]) / 2 - ended.mean, kind="stable")
    outputs = _events(at[f"{OUTPUTS}_count"], at[f"{OUTPUTS}_sum"]).part(by_send[in_flight:])
    prompts = _events(first_tokens, at[PROMPTS]).part(slice(waiting, None))
    return pl.DataFrame(
        {
            "sent_us": (np.sort(low_s + share * (high_s - low_s)) * US_PER_S).astype(np.int64),
            "prompt_tokens": prompts.tokens(count, random),
            "output_tokens": outputs.tokens(count, random),
        }
    )
