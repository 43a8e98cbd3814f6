"""Coefficients from recordings of every step, by the recorder or by the server's log: nothing is searched for.

Each step says what it computed and how long it took.  The cost is a line through all steps, or a roofline if few
prompt tokens are hidden by the reading of the weights.  Each request says when it was sent, queued and had its
tokens: the delays around the engine are differences.

A log counts requests and tokens of each iteration, and says how long the engine waited for the model.  The counts tell
which requests were in it (``ingest.steps.followed``).  What the engine does between two waits is not in the log.  But
the server measured each request from its first token to its last, which is the sum of the cycles between.  A line
through these sums gives a share per step and one per request in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.latency.models import LatencyModel, Lifecycle, Roofline
from blis_replay.blis.releases.fit import CoefficientFit, Scatter
from blis_replay.blis.trace import KvCacheGroup
from blis_replay.ingest.checks.stationarity import STALL_US
from blis_replay.ingest.recording import NOT_KNOWN, Recording
from blis_replay.ingest.steps.admissions import Decodes, admissions_of, decodes_of
from blis_replay.ingest.steps.followed import Followed, followed_log
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.replay.engine import cache_groups_of
from blis_replay.replay.observed import observed_cycles
from blis_replay.replay.warm_up import Stalls
from blis_replay.validate.fit.evidence import lifecycle_of
from blis_replay.validate.fit.linear import fit_costs
from blis_replay.validate.fit.minimise import correlation_of
from blis_replay.validate.fit.step_form import BELIEVED, MOST_READING
from blis_replay.validate.metrics.resampling import SEED, interval, resampled, row_blocks

# The five costs of a step: itself, and per prefill token, decode, context token of a decode, and 1,000 KV tokens that
# prefill tokens attend to.
STEP_COSTS = ("intercept", "per_prefill_token", "per_decode_token", "per_context_token", "per_1000_attended")
FORM = "line through every step"
ROOFLINE_FORM = "roofline through every step"
# Knees of a roofline that single steps are tried with, in tokens: a CPU computes few while it reads the weights.
_KNEES = (25.0, 50.0, 100.0, 200.0, BELIEVED.knee_tokens)
# Standard errors by which a roofline must do better than a line: of five knees one is better by two by chance.
_CLEARLY = 3.0
# Fewest steps that a line is fitted to.
_FEWEST_STEPS = 100
# A step that takes more than this many times what the line says was held up: kernels were compiled, a machine stood
# still.  So was one of more than STALL_US beyond the line; a step with many prompts is long itself.
_OUTLIER = 10.0
# Steps of a block, and draws of blocks, for the interval of a coefficient.
_BLOCK_STEPS = 50
_DRAWS = 200
# Fewest requests that must have been measured around the engine, or in it.
_FEWEST_REQUESTS = 20
# us before a request was queued in which others ended, for the engine to have been busy: a pause between two steps.
_JUST_NOW_US = 2_000
# Standard deviation of a delay around the engine, us: servers of our own recordings (tiny-live-a to e).
_DELAY_SPREAD_US = 3_000.0
# Quantiles to which longer and shorter delays are clipped.
_DRAWN_IN = (0.02, 0.98)
# A delay above this many times the median is of a machine that stood still, as for 9 s of tiny-live-e.
_STOOD_STILL = 20.0
# Least share of the steps of a log that the requests explain.
_EXPLAINED = 0.9


@dataclass(frozen=True)
class EveryStep:
    """The steps of a run, one after the other, and the delays of its requests around the engine.

    ``batch``: float64[steps, 5] as ``STEP_COSTS``.  ``cycle_us``: float64[steps], start to start while the engine is
    busy.  ``start_us``: int64[steps], ascending.  ``usable``: bool[steps], whether a step computed something and the
    next one began at once.  ``requests``: ``_REQUEST_SCHEMA``.
    """

    batch: Floats
    cycle_us: Floats
    start_us: Int64s
    usable: Bools
    requests: pl.DataFrame

    def within(self, window: tuple[float, float]) -> Bools:
        """bool[steps]: the usable steps of a share of the run, by time."""
        first_us, last_us = int(self.start_us[0]), int(self.start_us[-1])
        low_us, high_us = (first_us + share * (last_us - first_us) for share in window)
        return self.usable & (self.start_us >= low_us) & (self.start_us <= high_us)

    def stalls(self, line: Floats, roofline: Roofline | None) -> Stalls | None:
        """The steps that were held up, by how much more they took than the line through the others says."""
        modelled_us = _shown(self.batch, roofline) @ line
        held = self.usable & _held_up(self.cycle_us, modelled_us)
        longer_us = (self.cycle_us - modelled_us)[held]
        return Stalls(self.start_us[held].astype(np.int64), longer_us.astype(np.int64)) if held.any() else None

    def scattered(self, line: Floats, roofline: Roofline | None, window: tuple[float, float]) -> Floats:
        """float64[steps, 2]: us of the steps of a share of the run that were not held up, recorded and modelled."""
        within = self.within(window)
        modelled_us, cycle_us = _shown(self.batch[within], roofline) @ line, self.cycle_us[within]
        return np.column_stack([cycle_us, modelled_us])[~_held_up(cycle_us, modelled_us)]


_REQUEST_SCHEMA = {
    "arrival_us": pl.Int64,
    "prompt_tokens": pl.Int64,
    # From the client's send to the waiting queue, and from the engine's first token to the client.  The simulator has
    # one delay for both, before the queue, as no request can tell them apart.
    "around_us": pl.Float64,
    "later_us": pl.Float64,  # by how much longer the last token takes to the client than the first
    "turn_us": pl.Float64,  # part of ``around_us``: the wait for the engine's turn, which the simulator adds itself
}


@dataclass(frozen=True)
class Measured:
    """The step time, the delays, what each rests on, and how well the line fits.

    ``correlation``: of the costs of a step, as ``FitRecord`` has it.  ``steps``: fitted steps, without those that were
    held up; ``error``: mean absolute error of one, a fraction; ``total``: of their sum, signed.  ``stalls``: the steps
    that were held up, by slug, of the whole run.
    """

    form: str
    latency: LatencyModel
    lifecycle: Lifecycle
    coefficients: tuple[CoefficientFit, ...]
    correlation: tuple[tuple[float, ...], ...]
    scatter: Scatter
    steps: int
    error: float
    total: float
    stalls: dict[str, Stalls]


def was_recorded(recording: Recording) -> bool:
    """Whether a recorder in the server noted every step of it, one after the other, on a clock that is known."""
    setting = recording.engine.get("max_num_seqs")
    if setting is None or setting.detail != "recorder" or is_asynchronous(recording) or recording.snapshots.is_empty():
        return False
    if any(clock.name == "step" and clock.placed == NOT_KNOWN for clock in recording.clocks):
        return False
    known = recording.steps.aggregate(steps="count(*)", ids="max(step_id) - min(step_id) + 1")
    return bool(known["steps"] >= _FEWEST_STEPS and known["steps"] == known["ids"])


def measure(recordings: Sequence[Recording], window: tuple[float, float], seed: int = SEED) -> Measured | None:
    """The step time and the delays of recordings over a share of each by time; None if one does not have every step."""
    runs: list[tuple[Recording, EveryStep]] = []
    for recording in recordings:
        if (run := recorded_steps(recording) if was_recorded(recording) else logged_steps(recording)) is None:
            return None
        runs.append((recording, run))
    parts = [(run, run.within(window)) for _recording, run in runs]
    batch = np.vstack([run.batch[within] for run, within in parts])
    cycle_us = np.concatenate([run.cycle_us[within] for run, within in parts])
    roofline = _roofline_of(batch, cycle_us)
    batch = _shown(batch, roofline)
    line = fit_steps(batch, cycle_us)
    low, high, correlation = _bounds(batch, cycle_us, seed)
    modelled_us = batch @ line
    kept = ~_held_up(cycle_us, modelled_us)
    remark = f"fitted to {kept.sum():,} steps, one by one"
    remark += "" if kept.all() else f", {(~kept).sum():,} more that were held up left out"
    costs = [
        CoefficientFit(name, *_digits(*values), "fitted", remark)
        for name, values in zip(STEP_COSTS, zip(line, low, high, strict=True), strict=True)
    ]
    delays = _delays(np.vstack([_arrived(run.requests, recording, window) for recording, run in runs]), seed)
    ns = [round(float(value) * 1000) for value in line]
    form, latency = FORM, LatencyModel("blackbox", ns[0], ns[1], ns[2], ns[3], per_1000_attended_ns=ns[4])
    if roofline is not None:
        form, latency = ROOFLINE_FORM, replace(latency, kind="roofline", roofline=roofline)
    modelled_us, cycle_us = modelled_us[kept], cycle_us[kept]
    scatter = scatter_of([run.scattered(line, roofline, window) for _recording, run in runs])
    stalls = {r.slug: held for r, run in runs if (held := run.stalls(line, roofline)) is not None}
    return Measured(
        form,
        latency,
        lifecycle_of(delays),
        (*costs, *delays),
        correlation,
        scatter,
        steps=len(cycle_us),
        error=float(np.abs(modelled_us / cycle_us - 1).mean()),
        total=float(modelled_us.sum() / cycle_us.sum() - 1),
        stalls=stalls,
    )


def _shown(batch: Floats, roofline: Roofline | None) -> Floats:
    """Batches without the prefill tokens that ride free, so that the others are costs of a line."""
    if roofline is None:
        return batch
    free = np.zeros_like(batch)
    free[:, 1] = roofline.more_us(batch[:, 1], batch[:, 2], 1.0)
    return np.asarray(batch + free, np.float64)


def _roofline_of(batch: Floats, cycle_us: Floats) -> Roofline | None:
    """The roofline that single steps show, None where a line is as good."""
    modelled_us = batch @ fit_steps(batch, cycle_us)
    weight = ~_held_up(cycle_us, modelled_us) / np.maximum(modelled_us, 1.0)
    blocks = np.arange(len(cycle_us)) // _BLOCK_STEPS
    best, most, before = None, 0.0, weight * (modelled_us - cycle_us) ** 2
    for knee in _KNEES:
        roofline = replace(BELIEVED, knee_tokens=knee)
        shown = _shown(batch, roofline)
        costs = fit_steps(shown, cycle_us)
        if knee * costs[1] > MOST_READING * costs[0]:
            continue  # reading the weights would take longer than an empty step
        gain = np.bincount(blocks, before - weight * (shown @ costs - cycle_us) ** 2)
        if gain.sum() > max(most, _CLEARLY * float(gain.std()) * len(gain) ** 0.5):
            best, most = roofline, float(gain.sum())
    return best


def scatter_of(runs: Sequence[Floats]) -> Scatter:
    """How steps of runs scatter; float64[steps, 2] of each, recorded and modelled us in order."""
    by_doubling, parts = [], runs
    while pairs := [part[: len(part) // 2 * 2].reshape(-1, 2, 2) for part in parts if len(part) > 1]:
        apart = [pair[:, 0, 0] / pair[:, 0, 1] - pair[:, 1, 0] / pair[:, 1, 1] for pair in pairs]
        weight = [pair[:, :, 1].sum(axis=1) for pair in pairs]
        by_doubling.append(float(np.average(np.concatenate(apart) ** 2, weights=np.concatenate(weight)) ** 0.5 / 2))
        parts = [pair.sum(axis=1) for pair in pairs]
    return Scatter(round(float(np.vstack(runs)[:, 0].mean()), 3), tuple(round(by, 4) for by in by_doubling))


def _held_up(cycle_us: Floats, modelled_us: Floats) -> Bools:
    """bool[steps]: whether something else than its batch made a step long."""
    return (cycle_us > _OUTLIER * np.maximum(modelled_us, 1.0)) | (cycle_us - modelled_us > STALL_US)


_COMPUTED = ("step_id", "scheduled_tokens", "computed_tokens", "prompt_tokens", "output_tokens")


def _prefills(recording: Recording, groups: tuple[KvCacheGroup, ...]) -> pl.DataFrame:
    """By step the prefill tokens, the KV tokens that they attend to in a mean layer, and those that ``resumed`` do.

    ``resumed``: requests that computed their last token only when they came back, which costs as a decode.
    """
    parts, scheduled, computed = [], pl.col("scheduled_tokens"), pl.col("computed_tokens")
    last = (scheduled == 1) & (pl.col("output_tokens") > 0)
    last &= computed + 1 == pl.col("prompt_tokens") + pl.col("output_tokens")
    for part in recording.snapshots.batches(_COMPUTED):
        attended = attended_by(groups, part["computed_tokens"].to_numpy(), part["scheduled_tokens"].to_numpy())
        known = pl.Series(attended, nan_to_null=True)  # a record without its count is left out
        counted = part.select("step_id", scheduled.alias("tokens"), last.alias("last"), attended=known)
        summed = pl.col("attended").filter(pl.col("last").fill_null(False)).sum().alias("resumed")
        parts.append(counted.group_by("step_id").agg(pl.col("tokens", "attended").sum(), summed))
    return pl.concat(parts).group_by("step_id").agg(pl.col("tokens", "attended", "resumed").sum())


def _context_at(groups: tuple[KvCacheGroup, ...], decodes: Decodes, steps: Int64s) -> Floats:
    """float64[steps]: KV tokens that the decodes attend to in a mean layer, their own included."""
    whole = decodes.context_at(steps).astype(np.float64)
    total = whole * (len(groups) or 1)
    for group in groups:
        if group.kind == "state":
            total -= whole
        beyond = decodes.beyond(group.size) if group.size else decodes
        if group.kind == "window":
            total -= beyond.context_at(steps)
        while group.kind == "chunk" and len(beyond.first):  # one more chunk is left behind
            total -= group.size * beyond.at(steps)
            beyond = beyond.beyond(group.size)
    return np.asarray(total / (len(groups) or 1), np.float64)


def recorded_steps(recording: Recording) -> EveryStep:
    """The steps of a recording that ``was_recorded``."""
    cycles, _basis = observed_cycles(recording)
    steps = recording.steps.frame(["step_id", "start_us", "prefill_tokens", "decode_tokens"])
    groups = cache_groups_of(recording)
    prefills = _prefills(recording, groups)
    context = _context_at(groups, decodes_of(admissions_of(recording)), steps["step_id"].to_numpy())
    timed = pl.DataFrame({"start_us": cycles.from_us, "cycle_us": cycles.cycle_us, "whole": cycles.begins})
    tokens, decodes = pl.col("tokens"), pl.col("prefill_tokens") + pl.col("decode_tokens") - pl.col("tokens")
    rows = (
        steps.with_columns(context=pl.Series(context))
        .join(prefills, on="step_id", how="left", maintain_order="left")
        .with_columns(pl.col("tokens", "attended", "resumed").fill_null(0))
        .with_columns(
            decodes=decodes, context=pl.col("context") + pl.col("resumed"), attended=pl.col("attended") / 1000
        )
        .join(timed.unique("start_us", keep="first"), on="start_us", how="inner", maintain_order="left")
    )
    batch = rows.select(pl.lit(1.0).alias("step"), tokens, "decodes", "context", "attended").cast(pl.Float64)
    usable = rows.select(pl.col("whole") & (tokens + pl.col("decodes") > 0)).to_series()
    cycle_us = rows["cycle_us"].cast(pl.Float64).to_numpy()
    start_us = rows["start_us"].to_numpy()
    return EveryStep(batch.to_numpy(), cycle_us, start_us, usable.to_numpy(), _stamped_requests(recording))


def _stamped_requests(recording: Recording) -> pl.DataFrame:
    """``_REQUEST_SCHEMA`` by the recorder's stamps of the engine."""
    requests = recording.requests.frame(["request_index", "arrival_us", "prompt_tokens", "ttft_us", "e2e_us", "status"])
    stamps = recording.lifecycles.frame(["request_index", "queued_us", "first_token_us", "finished_us"])
    stamped = stamps.drop_nulls().unique("request_index", keep="none")
    answered = requests.filter(pl.col("status") == "ok").drop_nulls()
    both = answered.join(stamped, on="request_index", maintain_order="left")
    turn_us = _turns_us(recording, both["queued_us"].to_numpy(), both["finished_us"].to_numpy())
    return _requests(
        both.with_columns(turn_us=pl.Series(turn_us)),
        around_us=pl.col("queued_us") + pl.col("ttft_us") - pl.col("first_token_us"),
        later_us=pl.col("first_token_us") + pl.col("e2e_us") - pl.col("ttft_us") - pl.col("finished_us"),
    )


def _requests(frame: pl.DataFrame, **delays: pl.Expr) -> pl.DataFrame:
    return frame.with_columns(**delays).select(pl.col(name).cast(kind) for name, kind in _REQUEST_SCHEMA.items())


def _arrived(requests: pl.DataFrame, recording: Recording, window: tuple[float, float]) -> Floats:
    """float64[requests, 4] of a share of the run by time: prompt tokens, the two delays without the turn, a weight."""
    last_us = float(recording.requests.aggregate(us="max(arrival_us)")["us"] or 0)
    chosen = requests.filter(pl.col("arrival_us").is_between(window[0] * last_us, window[1] * last_us))
    # The variance of a moment that lies anywhere in twice the turn, beside that of the delay itself.
    weight = 1 / (_DELAY_SPREAD_US**2 + pl.col("turn_us") ** 2 / 3)
    delay_us = pl.col("around_us") - pl.col("turn_us")
    rows = chosen.select(pl.col("prompt_tokens").cast(pl.Float64), delay_us, "later_us", weight.alias("weight"))
    return rows.to_numpy()


def fit_steps(batch: Floats, cycle_us: Floats) -> Floats:
    """float64[5]: costs in us, none negative, of the line through single steps.

    Each step counts by its variance, which grows with the length that the line gives it, so that short steps are as
    right in sum as long ones.  Steps that were held up are left out.
    """

    def weights(modelled_us: Floats | None) -> Floats:
        if modelled_us is None:
            return np.ones(len(cycle_us))
        return np.asarray(~_held_up(cycle_us, modelled_us) / np.maximum(modelled_us, 1.0), np.float64)

    return fit_costs(batch, cycle_us, weights)[0]


def _bounds(batch: Floats, cycle_us: Floats, seed: int) -> tuple[Floats, Floats, tuple[tuple[float, ...], ...]]:
    """float64[5] each: bounds of 95 % of the costs, over draws of blocks of neighbouring steps; their correlation."""
    blocks = np.array_split(np.arange(len(cycle_us)), max(len(cycle_us) // _BLOCK_STEPS, 2))
    lines = []
    for draw in resampled(row_blocks(np.zeros(len(blocks), np.int64), []), _DRAWS, seed):
        chosen = np.concatenate([blocks[block] for block in draw])
        lines.append(fit_steps(batch[chosen], cycle_us[chosen]))
    low, high = np.array([interval(column) for column in np.array(lines).T]).T
    return low, high, correlation_of(np.array(lines))


def _turns_us(recording: Recording, queued_us: Int64s, finished_us: Int64s) -> Floats:
    """float64[n] us: half of the step that each request had to wait for, 0 where the engine stood idle.

    A busy engine takes requests in between two steps, wherever in the step they came: half of it earlier on average,
    which the simulator's own loop adds again.
    """
    starts_us = recording.steps["start_us"].to_numpy()
    place = np.searchsorted(starts_us, queued_us, side="left") - 1
    # Others were there until just now: they end when the output of a step is processed, right before requests are taken
    # in.
    order = np.argsort(queued_us, kind="stable")
    latest_us = np.maximum.accumulate(finished_us[order])
    before = np.searchsorted(queued_us[order], queued_us, side="left") - 1
    others: Bools = (before >= 0) & (latest_us[np.maximum(before, 0)] >= queued_us - _JUST_NOW_US)
    return np.where((place >= 0) & others, (queued_us - starts_us[np.maximum(place, 0)]) / 2, 0.0)


def _delays(rows: Floats, seed: int) -> tuple[CoefficientFit, ...]:
    """The delays around the engine, by the rows of ``_arrived``; none for fewer than 20 requests."""
    if len(rows) < _FEWEST_REQUESTS:
        return ()
    # Single outliers are clipped; where a machine stood still for seconds, all requests of that time are late.
    median_us = max(float(np.median(rows[:, 1])), _DELAY_SPREAD_US)
    kept = np.abs(rows[:, 1:3]).max(axis=1) <= _STOOD_STILL * median_us + 3 / np.sqrt(rows[:, 3])
    values = rows if kept.mean() >= _DRAWN_IN[1] else rows[kept]
    what, held_up = f"of {len(values):,} requests with stamps of client and engine", len(rows) - len(values)
    what += f", {held_up:,} more that were held up left out" if held_up else ""
    remarks = {
        "pre_queue": f"mean way in and of the first token back {what}, at no prompt",
        "pre_queue_per_prompt_token": f"slope of that over the prompt {what}",
        "post_request": f"mean way of the last token back, beyond that of the first, {what}",
    }
    blocks = row_blocks(np.zeros(len(values), np.int64), [values[:, 1]])
    for sloped in (True, False):
        draws = np.array([_delays_us(values[draw], sloped=sloped) for draw in resampled(blocks, _DRAWS, seed)])
        if interval(draws[:, 1])[0] > 0:
            break  # else the slope may be none, as that of a few odd prompts is
    values_us = _delays_us(values, sloped=sloped)
    return tuple(
        CoefficientFit(name, *_digits(value_us, *interval(drawn_us)), "measured", remark)
        for (name, remark), value_us, drawn_us in zip(remarks.items(), values_us, draws.T, strict=True)
    )


def _delays_us(rows: Floats, *, sloped: bool) -> tuple[float, float, float]:
    """us at no prompt, per prompt token (a weighted line, outliers clipped), and of the last token; none negative.

    ``sloped``: else it is the same for all prompts.
    """
    prompts, us = rows[:, 0], np.clip(rows[:, 1], *np.quantile(rows[:, 1], _DRAWN_IN))
    columns = [np.ones(len(us)), prompts] if sloped and np.ptp(prompts) else [np.ones(len(us))]
    around = [*fit_costs(np.column_stack(columns), us, lambda _: rows[:, 3])[0].tolist(), 0.0]
    return around[0], around[1], max(float(rows[:, 2].mean()), 0.0)


def _digits(value: float, low: float, high: float) -> tuple[float, float, float]:
    """In whole ns, as a release has them."""
    return round(float(value), 3), round(float(low), 3), round(float(high), 3)


def logged_steps(recording: Recording) -> EveryStep | None:
    """The steps of a recording by its server's log; None where the log and the requests do not tell them all.

    Scheduling must be synchronous, or the wait for the model is not part of a step.  One engine must have served all.
    """
    log = None if is_asynchronous(recording) else followed_log(recording)[0]
    if log is None:
        return None
    iterations, served, followed = log.iterations, log.served, log.walk
    timed = served.select(pl.all_horizontal(pl.col("decode_us", "queue_us").is_not_null())).to_series().to_numpy()
    measured = (followed.admitted >= 0) & (followed.first < followed.last) & (followed.last < followed.end) & timed
    if followed.end - followed.begin < _EXPLAINED * iterations.height or measured.sum() < _FEWEST_REQUESTS:
        return None
    rest = slice(followed.begin, followed.end)
    batch = _batch(iterations, served, followed, cache_groups_of(recording))
    waited_us = iterations["elapsed_us"].to_numpy().astype(np.float64)
    requests = batch[:, 2] + iterations["prefill_requests"].to_numpy()
    parts = np.column_stack([np.ones(len(batch)), requests])
    # What a step and each request in it add to the wait for the model: a line through sums over measured requests.
    decode_us = served["decode_us"].to_numpy()[measured]
    sums = _while_decoding(np.column_stack([parts, waited_us]), followed, measured)
    around, _ = fit_costs(sums[:, :2], decode_us - sums[:, 2], lambda _: 1 / sums[:, 0])
    own = served.select(pl.col("request_index").fill_null(-1), pl.col("queue_us").fill_null(0)).filter(measured)
    cycle_us = (waited_us + parts @ around)[rest]
    admitted = followed.admitted[measured] - followed.begin
    turn_us = _logged_turns_us(batch[rest], cycle_us, own["queue_us"].to_numpy(), admitted)
    start_us = iterations["start_us"].fill_null(strategy="forward").fill_null(0).to_numpy()[rest]
    timed_requests = _timed_requests(recording, own.select("request_index", turn_us=pl.Series(turn_us)))
    return EveryStep(batch[rest], cycle_us, start_us, batch[rest, 1] + batch[rest, 2] > 0, timed_requests)


def _logged_turns_us(batch: Floats, cycle_us: Floats, queue_us: Int64s, admitted: Int64s) -> Floats:
    """float64[requests] us: half of the step that each had to wait for, 0 where the engine stood idle.

    ``admitted``: int64[requests], the step that took each in.  A request is stamped as queued right after the step in
    which it came, and waits in the queue from there on.
    """
    ends_us = np.concatenate([[0.0], np.cumsum(cycle_us)])
    queued_us = ends_us[admitted] - queue_us
    # The end that is nearest to the stamp: halfway between two ends, the later one.
    nearest = np.searchsorted((ends_us[:-1] + ends_us[1:]) / 2, queued_us, side="right")
    came_in = np.clip(nearest - 1, 0, None)
    waited = came_in < admitted - 1
    others: Bools = waited | (batch[admitted, 2] > 0)
    return np.where(others & (admitted > 0), cycle_us[came_in] / 2, 0.0)


def _timed_requests(recording: Recording, turns: pl.DataFrame) -> pl.DataFrame:
    """``_REQUEST_SCHEMA`` by what the server measured of each request in its engine."""
    spans = ("ttft_us", "e2e_us", "queue_us", "prefill_us", "decode_us")
    requests = recording.requests.frame(["request_index", "arrival_us", "prompt_tokens", "status", *spans])
    timed = requests.filter(pl.col("status") == "ok").drop_nulls()
    return _requests(
        timed.join(turns, on="request_index", maintain_order="left"),
        around_us=pl.col("ttft_us") - pl.col("queue_us") - pl.col("prefill_us"),
        later_us=pl.col("e2e_us") - pl.col("ttft_us") - pl.col("decode_us"),
    )


def _while_decoding(columns: Floats, followed: Followed, chosen: Bools) -> Floats:
    """float64[requests, n]: sums of columns, [steps, n], over the steps between a request's first token and last."""
    upto = np.vstack([np.zeros(columns.shape[1]), np.cumsum(columns, axis=0)])
    return np.asarray(upto[followed.last[chosen] + 1] - upto[followed.first[chosen] + 1], np.float64)


def _batch(
    iterations: pl.DataFrame, served: pl.DataFrame, followed: Followed, groups: tuple[KvCacheGroup, ...]
) -> Floats:
    """float64[steps, 5]: what each iteration held, as ``STEP_COSTS``."""
    steps, prompt = np.arange(iterations.height), served["prompt_tokens"].fill_null(0).to_numpy()
    decoding = (followed.first >= 0) & (followed.last > followed.first)
    first, last = followed.first[decoding], followed.last[decoding]
    decodes = Decodes(first + 1, last, prompt[decoding] - first)
    tokens = iterations["prefill_tokens"].to_numpy().astype(np.float64)
    step, before, chunk = np.array(list(_chunks(tokens, prompt, followed)), np.int64).reshape(-1, 3).T
    attended = np.bincount(step, attended_by(groups, before, chunk) / 1000, len(steps))
    context = _context_at(groups, decodes, steps)
    return np.column_stack([np.ones(len(steps)), tokens, decodes.at(steps), context, attended])


def _chunks(tokens: Floats, prompt: Int64s, followed: Followed) -> Iterator[tuple[int, int, int]]:
    """Step, tokens before and tokens of each part of a prompt; requests compute theirs in order of admission."""
    left = tokens.copy()
    for request in np.argsort(followed.admitted, kind="stable"):
        step, last = int(followed.admitted[request]), int(followed.first[request])
        todo = int(followed.computed[request])
        before = int(prompt[request]) - todo
        while 0 <= step <= last and todo > 0:
            chunk = min(todo, int(left[step]))
            yield step, before, chunk
            left[step] -= chunk
            todo, before, step = todo - chunk, before + chunk, step + 1
