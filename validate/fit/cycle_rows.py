"""Rows that a step-time line is fitted to: mean batches and mean step cycles.

*Step records* give windows of sampled steps: the time between two sampled starts, divided by the difference of their
ids, is the mean cycle.  *Latencies* give one row per request: the time between its first and last token, divided by the
steps between them, is the mean cycle while it decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ValidateError
from blis_replay.blis.grouping import attended_by
from blis_replay.ingest.recording import Recording
from blis_replay.replay.engine import cache_groups_of
from blis_replay.replay.prefix import prompt_tokens
from blis_replay.replay.prefix_estimate import estimate_prefix
from blis_replay.validate.metrics.observed import Selection


@dataclass(frozen=True)
class MeanLengths:
    """Means over requests: prompt and output tokens, and the KV tokens that a decode attends to in a mean layer."""

    prompt_tokens: float
    output_tokens: float
    context_tokens: float


def mean_lengths(recording: Recording) -> MeanLengths:
    """Mean lengths of a recording; long outputs decode in more steps, so they weigh more in the context.

    Raises ``ValidateError`` without requests.
    """
    if recording.requests.height == 0:
        raise ValidateError(f"{recording.alias}: no requests are recorded, so their lengths are unknown; ingest them")
    answered = recording.requests["output_tokens"].is_not_null().to_numpy()
    prompts = prompt_tokens(recording)[answered]
    outputs = recording.requests["output_tokens"].drop_nulls().to_numpy().astype(np.float64)
    if not outputs.sum() > 0:
        prompts = prompt_tokens(recording)
        return MeanLengths(float(prompts.mean()), 1.0, float(_context(recording, prompts, np.zeros(1)).mean()))
    context = float((outputs * _context(recording, prompts, outputs)).sum() / outputs.sum())
    return MeanLengths(float(prompts.mean()), float(outputs.mean()), context)


def _context(recording: Recording, prompts: Int64s, outputs: Floats) -> Floats:
    """float64[n]: KV tokens that a decode attends to in a mean layer, half way through its output."""
    return attended_by(cache_groups_of(recording), prompts + outputs / 2 - 1, 1)


# us of a row of steps: long enough that the unknown offset between the clocks of steps and client
# moves few prefills across an edge, short enough that a cold start of 10 seconds makes several rows.
_WINDOW_US = 5_000_000

# Least share of the requests that must be timed to know the context of a row.
_LEAST_TIMED = 0.9

# Running requests below which the engine may have been idle between two sampled steps.
_BUSY_DEPTH = 4


def busy_depth(recording: Recording) -> int:
    """Running requests from which the engine is taken to be busy; as many as it takes, where these are fewer."""
    most = recording.engine.get("max_num_seqs")
    return _BUSY_DEPTH if most is None else min(_BUSY_DEPTH, int(most.value))


@dataclass(frozen=True)
class CycleRows:
    """``batch``: float64[rows, 4]: 1, prefill, decode and context tokens of a mean step.

    ``cycle_us``: float64[rows], mean step cycle.  ``context_known``: whether the last column was observed; otherwise
    each decode has the context of an average request.  ``start_us``: int64[rows], when each begins, of rows from steps.
    ``mixed_share``: float64[rows], the share of the steps that prefill.
    """

    batch: Floats
    cycle_us: Floats
    context_known: bool
    start_us: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    mixed_share: Floats = field(default_factory=lambda: np.empty(0, np.float64))


def rows_from_steps(recording: Recording, window: tuple[float, float] = (0.0, 1.0)) -> CycleRows:
    """Rows from start-to-start step cycles; never from ``step.duration_us``.

    ``window``: the share of the run to use, by time.  Decodes of a row are the mean of its sampled steps; a row in
    which the server may have been idle is left out.  Prefill tokens are those of the requests whose first token came
    in it, less their prefix hits: a 10 % sample of steps holds too few of the large prefills.
    """
    counted = ["step_id", "start_us", "decode_tokens", "running_depth"]
    steps = recording.steps.frame(counted).drop_nulls().sort("step_id")
    step_id, start_us, decode, running = (steps[name].to_numpy() for name in counted)
    low_us, high_us = (start_us[0] + share * (start_us[-1] - start_us[0]) for share in window)
    edges = [int(np.searchsorted(start_us, low_us))]
    while edges[-1] < len(start_us) - 1:
        last = min(int(np.searchsorted(start_us, start_us[edges[-1]] + _WINDOW_US)), len(start_us) - 1)
        if start_us[last] > high_us:
            break
        edges.append(last)
    busy = busy_depth(recording)
    rows = [(a, b) for a, b in pairwise(edges) if step_id[b] > step_id[a] and running[a:b].min() >= busy]
    at = np.array(rows, np.int64).reshape(-1, 2)
    count, between_us = np.diff(step_id[at])[:, 0].astype(np.float64), start_us[at]
    decodes = np.array([decode[a:b].mean() for a, b in rows], np.float64)
    # Each prefill at its first token, or its arrival where that is not known.
    timed, first_us, last_us, context = _decoding(recording)
    at_us = recording.requests["arrival_us"].to_numpy().astype(np.float64)
    at_us[timed] = first_us
    between = between_us.T.astype(np.float64)
    prefill_tokens = estimate_prefix(recording).prefill_tokens
    prefill = _between(at_us, prefill_tokens, *between) / count
    mixed_share = np.minimum(_between(at_us, _prefilling_steps(recording, prefill_tokens), *between) / count, 1)
    # Where prompts happen to be long there are both more prefill tokens and more context.  With one context for all
    # rows the prefill would get the price of both.
    contexts = np.full(len(rows), mean_lengths(recording).context_tokens)
    if len(rows) and timed.sum() >= _LEAST_TIMED * len(timed):
        decoding = _mean_level(first_us, last_us, np.ones(len(first_us)), *between)
        np.divide(_mean_level(first_us, last_us, context, *between), decoding, out=contexts, where=decoding > 1)
    batch = np.column_stack([np.ones(len(rows)), prefill, decodes, decodes * contexts])
    return CycleRows(batch, np.diff(between_us)[:, 0] / count, False, between_us[:, 0], mixed_share)


def _prefilling_steps(recording: Recording, prefill_tokens: Int64s) -> Int64s:
    """int64[n]: in how many steps each prompt is computed, as far as the token budget is known."""
    budget = recording.engine.get("max_num_batched_tokens")
    steps: Int64s = -(-prefill_tokens // (int(budget.value) if budget else 1 << 40))
    return steps


def _decoding(recording: Recording) -> tuple[Bools, Floats, Floats, Floats]:
    """bool[n] of the requests with both latencies and a length; their first and last token, us, and mean context."""
    needed = ("ttft_us", "e2e_us", "output_tokens")
    timed = pl.all_horizontal(pl.col("status") == "ok", *(pl.col(name).is_not_null() for name in needed))
    ok = recording.requests.select(timed).to_series().to_numpy()
    requests = recording.requests.frame(["arrival_us", *needed]).filter(ok)
    first_us, last_us = (
        (requests["arrival_us"] + requests[name]).to_numpy().astype(np.float64) for name in ("ttft_us", "e2e_us")
    )
    outputs = requests["output_tokens"].to_numpy().astype(np.float64)
    context = _context(recording, prompt_tokens(recording)[ok], outputs)
    return ok, first_us, last_us, context


def rows_from_latencies(recording: Recording, window: tuple[float, float] = (0.0, 1.0)) -> CycleRows:
    """Rows from client or server latencies: one row per finished request with two tokens.

    A row covers the steps between a request's first and last token.  It has the mean number of requests that decode,
    their mean context (each at half its output), and the prefill tokens of the requests whose first token fell in
    between.  Where the server recorded prefill times, each that had the batch to itself also makes a row of one step.
    """
    ok, first_us, last_us, context = _decoding(recording)
    requests = recording.requests.frame(["output_tokens", "prefill_us"]).filter(ok)
    prefill_tokens = estimate_prefix(recording).prefill_tokens[ok]
    output_tokens = requests["output_tokens"].to_numpy().astype(np.float64)
    chosen = (output_tokens > 1) & (last_us > first_us) & Selection(window=window).of(recording.requests)[ok]
    steps, between, ones = output_tokens[chosen] - 1, (first_us[chosen], last_us[chosen]), np.ones(len(first_us))
    batch = np.column_stack(
        [
            np.ones(len(steps)),
            _between(first_us, prefill_tokens, *between) / steps,
            _mean_level(first_us, last_us, ones, *between),
            _mean_level(first_us, last_us, context, *between),
        ]
    )
    mixed_share = np.minimum(_between(first_us, _prefilling_steps(recording, prefill_tokens), *between) / steps, 1)
    prefill_us = requests["prefill_us"].to_numpy()
    alone = chosen & ~np.isnan(prefill_us)
    prefill = ((first_us - prefill_us)[alone], first_us[alone])
    alone[alone] = own = _between(first_us, prefill_tokens, *prefill) == prefill_tokens[alone]
    prefill = (prefill[0][own], prefill[1][own])
    ones_alone = np.ones(int(own.sum()))
    decodes = _mean_level(first_us, last_us, ones, *prefill)
    return CycleRows(
        np.vstack([batch, np.column_stack([ones_alone, prefill_tokens[alone], decodes, 0 * ones_alone])]),
        np.concatenate([(between[1] - between[0]) / steps, prefill_us[alone]]),
        context_known=True,
        mixed_share=np.concatenate([mixed_share, ones_alone]),
    )


def _between(at_us: Floats, amount: Int64s, low_us: Floats, high_us: Floats) -> Floats:
    """Sum of ``amount`` over events at ``at_us`` in each interval ``(low_us, high_us]``."""
    order = np.argsort(at_us, kind="stable")
    upto = np.concatenate([[0.0], np.cumsum(amount[order])])
    edges = at_us[order]
    within = upto[np.searchsorted(edges, high_us, side="right")] - upto[np.searchsorted(edges, low_us, side="right")]
    return np.asarray(within, np.float64)


def _mean_level(start_us: Floats, end_us: Floats, height: Floats, low_us: Floats, high_us: Floats) -> Floats:
    """Mean over each interval of the sum of ``height`` of the spans that are open."""
    at_us = np.concatenate([start_us, end_us])
    order = np.argsort(at_us, kind="stable")
    at_us, level = at_us[order], np.cumsum(np.concatenate([height, -height])[order])
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at_us))])

    def area_until(time_us: Floats) -> Floats:
        i = np.maximum(np.searchsorted(at_us, time_us, side="right") - 1, 0)
        return np.asarray(area[i] + level[i] * np.maximum(time_us - at_us[i], 0), np.float64)

    return (area_until(high_us) - area_until(low_us)) / (high_us - low_us)


# us, residual above which a row counts linearly, so that stalls do not bend the line: cycles of the bundled H100 runs
# scatter by 1 to 3 % of 8 to 20 ms.
_ROBUST_US = 200.0

# Intercept, and per prefill, decode and context token.
COEFFICIENTS = 4

# Correlation from which a fit cannot share a cost between two columns.
_ALIKE_FROM = 0.99


def fit_line(parts: Sequence[CycleRows]) -> Floats:
    """float64[4], none negative: us of a step, and per prefill, decode and context token; where a search starts.

    Least squares with a soft-l1 loss, by SciPy: the costs that ``linear`` finds differ in the fifth digit, and from
    there the search ends in other coefficients than those of the releases that ship.  The context column takes part
    only where every part observed it.  Where all requests are alike, decodes and context are in proportion; then the
    context keeps the cost, because every model reads the KV cache of its context, and that carries over to other
    lengths.
    """
    from scipy.optimize import least_squares  # heavy, and only calibration needs it

    batch = np.vstack([part.batch for part in parts])
    cycle_us = np.concatenate([part.cycle_us for part in parts])
    columns = [0, 1, 2, 3] if all(part.context_known for part in parts) else [0, 1, 2]
    if 3 in columns and _alike(batch[:, 2], batch[:, 3]):
        columns.remove(2)
    # Columns of like size: context runs to 100,000 tokens, prefill to single ones.
    scale = np.maximum(np.abs(batch[:, columns]).mean(axis=0), 1e-9)
    scaled = batch[:, columns] / scale
    start = np.maximum(np.linalg.lstsq(scaled, cycle_us, rcond=None)[0], 1e-6)
    fit = least_squares(
        lambda x: scaled @ x - cycle_us, start, bounds=(0, np.inf), loss="soft_l1", f_scale=_ROBUST_US, x_scale="jac"
    )
    coefficients_us = np.zeros(COEFFICIENTS)
    coefficients_us[columns] = fit.x / scale
    return coefficients_us


def _alike(decode: Floats, context: Floats) -> bool:
    """Whether the context of a batch tells no more than its number of decodes."""
    constant = np.ptp(decode) == 0 or np.ptp(context) == 0
    return bool(constant or np.corrcoef(decode, context)[0, 1] > _ALIKE_FROM)
