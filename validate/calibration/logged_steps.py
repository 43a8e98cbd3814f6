"""Every step of a server that only logged its iterations: what each held, and how long it was until the next.

The log counts requests and tokens of each iteration, and how long the engine waited for the model.  Which requests
were in it follows from the counts (``ingest.steps.followed``).  What the engine does between two waits is in no line of
the log; but the server measured each request from its first token to its last, which is the sum of the cycles
between.  So the rest is a line through these sums: a share a step, and one a request in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.compiled.arrays import Bools, Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.followed import Followed, followed_requests, served_requests
from blis_replay.ingest.steps.placed import whole_iterations, why_not
from blis_replay.ingest.steps.records import is_asynchronous

# Of the steps those that the requests must explain, and the requests that the server must have measured.
_EXPLAINED, _FEWEST_REQUESTS = 0.9, 20


@dataclass(frozen=True)
class LoggedSteps:
    """Steps that computed something, one after the other.

    ``batch``: float64[steps, 5]: 1, prefill tokens, decodes, their context, and 1,000 KV tokens that prefill tokens
    attend to.  ``cycle_us``: float64[steps], from the start of one to the start of the next while the engine is busy.
    ``start_us``: int64[steps].  By request: ``request_index``, ``queue_us``, and the step that ``admitted`` it, int64.
    """

    batch: Floats
    cycle_us: Floats
    start_us: Int64s
    request_index: Int64s
    queue_us: Int64s
    admitted: Int64s

    def turns_us(self) -> Floats:
        """float64[requests] us: half of the step that each had to wait for, 0 where the engine stood idle.

        A request is stamped as queued right after the step in which it came, and was in the queue from there on.
        """
        ends_us = np.concatenate([[0.0], np.cumsum(self.cycle_us)])
        queued_us = ends_us[self.admitted] - self.queue_us
        # The end that is nearest to the stamp: halfway between two ends, the later one.
        nearest = np.searchsorted((ends_us[:-1] + ends_us[1:]) / 2, queued_us, side="right")
        came_in = np.clip(nearest - 1, 0, None)
        waited = came_in < self.admitted - 1
        others: Bools = waited | (self.batch[self.admitted, 2] > 0)
        return np.where(others & (self.admitted > 0), self.cycle_us[came_in] / 2, 0.0)


def logged_steps(recording: Recording) -> LoggedSteps | None:
    """The steps of a recording by its server's log; None where the log and the requests do not tell them all.

    Under asynchronous scheduling the wait for the model is no part of a step, and one engine must have served all.
    """
    if recording.iterations.is_empty() or is_asynchronous(recording) or why_not(recording.iterations):
        return None
    iterations = whole_iterations(recording.iterations)
    served = served_requests(recording.requests, recording.lifecycles)
    found = followed_requests(recording, iterations, served)
    known = (found.admitted >= 0) & (found.last < found.end) & served["decode_us"].is_not_null().to_numpy()
    measured = known & (found.last > found.first) & served["queue_us"].is_not_null().to_numpy()
    if found.end - found.begin < _EXPLAINED * iterations.height or measured.sum() < _FEWEST_REQUESTS:
        return None
    rest = slice(found.begin, found.end)
    batch = _batch(iterations, served, found)
    waited_us = iterations["elapsed_us"].to_numpy().astype(np.float64)
    requests = batch[:, 2] + iterations["prefill_requests"].to_numpy()
    parts = np.column_stack([np.ones(len(batch)), requests])
    between = _between(found, measured)
    decode_us = served["decode_us"].to_numpy()[measured]
    around = _shares(between(parts), decode_us - between(waited_us[:, None])[:, 0])
    own = served.select(pl.col("request_index").fill_null(-1), pl.col("queue_us").fill_null(0)).filter(measured)
    return LoggedSteps(
        batch=batch[rest],
        cycle_us=(waited_us + parts @ around)[rest],
        start_us=iterations["start_us"].fill_null(strategy="forward").fill_null(0).to_numpy()[rest],
        request_index=own["request_index"].to_numpy(),
        queue_us=own["queue_us"].to_numpy(),
        admitted=found.admitted[measured] - found.begin,
    )


def _between(found: Followed, chosen: Bools):  # type: ignore[no-untyped-def]  # a function over columns
    """Sums of columns, [steps, n] to [requests, n], over the steps from the first token to the last of requests."""
    first, last = found.first[chosen], found.last[chosen]

    def sums(columns: Floats) -> Floats:
        upto = np.vstack([np.zeros(columns.shape[1]), np.cumsum(columns, axis=0)])
        return np.asarray(upto[last + 1] - upto[first + 1], np.float64)

    return sums


def _shares(sums: Floats, us: Floats) -> Floats:
    """float64[2] us, not negative: what a step and each request in it add to the wait for the model."""
    from scipy.optimize import nnls  # heavy, and only calibration needs it

    weight = 1 / np.sqrt(sums[:, 0])
    return np.asarray(nnls(sums * weight[:, None], us * weight)[0], np.float64)


def _batch(iterations: pl.DataFrame, served: pl.DataFrame, found: Followed) -> Floats:
    """float64[steps, 5]: what each iteration held, as ``LoggedSteps.batch``."""
    steps = iterations.height
    prompt = served["prompt_tokens"].fill_null(0).to_numpy()
    decoding = (found.first >= 0) & (found.last > found.first)
    begin, end = found.first[decoding] + 1, found.last[decoding] + 1
    # In step s a request attends to its prompt and s - first tokens of its own, the one that is computed included.
    at_zero = (prompt[decoding] - found.first[decoding]).astype(np.float64)
    decodes, context = (_level(begin, end, height, steps) for height in (np.ones(len(begin)), at_zero))
    context += decodes * np.arange(steps)
    tokens = iterations["prefill_tokens"].to_numpy().astype(np.float64)
    attended = _attended(tokens, prompt, found)
    return np.column_stack([np.ones(steps), tokens, decodes, context, attended / 1000])


def _level(begin: Int64s, end: Int64s, height: Floats, steps: int) -> Floats:
    """float64[steps]: the sum of heights of the requests that are in each step."""
    edges = np.zeros(steps + 1)
    np.add.at(edges, begin, height)
    np.add.at(edges, end, -height)
    return np.cumsum(edges)[:steps]


def _attended(tokens: Floats, prompt: Int64s, found: Followed) -> Floats:
    """float64[steps]: KV tokens that the prefill tokens attend to; requests compute theirs in order of admission."""
    attended = np.zeros(len(tokens))
    left = tokens.copy()
    for request in np.argsort(found.admitted, kind="stable"):
        step, last = int(found.admitted[request]), int(found.first[request])
        todo = int(found.computed[request])
        before = int(prompt[request]) - todo
        while 0 <= step <= last and todo > 0:
            chunk = min(todo, int(left[step]))
            attended[step] += chunk * before + chunk * (chunk + 1) / 2
            left[step] -= chunk
            todo, before, step = todo - chunk, before + chunk, step + 1
    return attended
