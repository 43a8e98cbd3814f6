"""A part of a recording as an experiment of its own: people record one server with several loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest.checks.ledger import CHECK, FEW_OTHERS, OTHERS, RULE
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.recording import NOT_KNOWN, REBUILT, Finding, Recording, Stage
from blis_replay.ingest.rows import rows_of

_MARGIN_US = 1_000_000  # clocks of two hosts may differ by it
_NO_FILE = "no client's file"
_COUNTERS = ("sum", "succeeded", "failed")  # statistics of what the server counts; they only grow
# Columns that are times from the experiment's zero, and those that number steps.
_TIMES = (
    *("arrival_us", "start_us", "time_us", "arrived_us", "handoff_us", "queued_us", "scheduled_us"),
    *("first_token_us", "first_response_us", "finished_us", "departed_us"),
)
_STEPS = ("step_id", "queued_step", "scheduled_step", "first_token_step", "finished_step")


@dataclass(frozen=True)
class _Part:
    """``index``: requests of the part, ``request_index`` and ``new``.  ``begin`` to ``end``: first send to last answer.

    ``low`` to ``high``: when what the server did is the part's own.  ``first_step``: steps before it, if the server
    was idle when it began; else 0.
    """

    index: pl.DataFrame
    begin: int
    end: int
    low: int
    high: int
    first_step: int = 0

    def moved(self, frame: pl.DataFrame) -> pl.DataFrame:
        """With times from the part's begin, steps counted from there, and requests by their new index."""
        if "request_index" in frame.columns:
            frame = frame.join(self.index, on="request_index", how="left", maintain_order="left")
            frame = frame.with_columns(pl.col("new").alias("request_index")).drop("new")
        times = [pl.col(name) - self.begin for name in _TIMES if name in frame.columns]
        return frame.with_columns(*times, *(pl.col(n) - self.first_step for n in _STEPS if n in frame.columns))


def sliced(recording: Recording, mine: Bools, files: NDArray[np.str_], *, with_report: bool = False) -> Recording:
    """The requests ``mine`` (bool[requests], one at least) and what the server did meanwhile.

    ``files``: str[requests], the client's file of each.  What others had in flight meanwhile is counted by name.
    ``with_report``: the client's report is of these requests, and of no others.
    """
    requests, journeys = recording.requests.frame(), recording.lifecycles.frame()
    came = requests["arrival_us"].to_numpy()
    left = came + requests["e2e_us"].fill_null(0).to_numpy()
    begin, end = int(came[mine].min()), int(left[mine].max())
    nobodys = journeys.filter(pl.col("request_index").is_null()).select(
        came=pl.coalesce("arrived_us", "queued_us"), left=pl.coalesce("departed_us", "finished_us", "queued_us")
    )
    nobodys = nobodys.drop_nulls()
    names = np.array([*files[~mine].tolist(), *[_NO_FILE] * nobodys.height], dtype=object)
    came, left = (np.concatenate([a[~mine], nobodys[name]]) for a, name in ((came, "came"), (left, "left")))
    client = recording.clock("client")
    # Sends that were not recorded begin at 0 in each file, and say nothing of when another file's came.
    rebuilt = client is not None and client.placed.startswith(REBUILT)
    beside = (came <= end) & (left >= begin) & (not rebuilt)
    index = pl.DataFrame({"request_index": np.flatnonzero(mine), "new": np.arange(mine.sum())})
    part = _Part(index, begin, end, begin - _room(begin - left), end + _room(came - end))
    clock, steps = recording.clock("step"), recording.steps.between("start_us", part.low, part.high).frame()
    steps = steps.clear() if clock is not None and clock.placed == NOT_KNOWN else steps
    log = recording.iterations.between("start_us", part.low, part.high).frame()
    if not (beside & (came < begin)).any():  # the server was idle, and this part begins as after a start
        part = replace(part, first_step=int(steps["step_id"].min() or 1) - 1)  # type: ignore[arg-type]
        log = log.with_columns(pl.col("iteration") - pl.col("iteration").min())
    during = pl.coalesce("arrived_us", "queued_us") <= part.high
    during &= pl.coalesce("departed_us", "finished_us", "queued_us") >= part.low
    own = part.moved(journeys.filter(during | pl.col("request_index").is_in(index["request_index"].to_list())))
    own = own.with_columns(pl.col("journey").alias("before"), pl.int_range(pl.len()).alias("journey"))
    events = recording.journey_events.frame().join(
        own.select(pl.col("before").alias("journey"), now="journey"), on="journey", maintain_order="left"
    )
    events = part.moved(events.with_columns(pl.col("now").alias("journey")).drop("now"))
    snapshots = recording.snapshots.frame().join(
        steps.select("step_id"), on="step_id", how="semi", maintain_order="left"
    )
    outside = {
        "step records": recording.steps.height - steps.height,
        "iterations": recording.iterations.height - log.height,
        **{f"requests of {name}": count for name, count in sorted(Counter(names[~beside]).items())},
    }
    said = ", ".join(f"{count:,} {what}" for what, count in outside.items() if count)
    remarks = (
        f"the rest of the recording: these are {mine.sum():,} of {len(mine):,} requests, {begin / 1e6:.1f} to "
        f"{end / 1e6:.1f} s of it{f'; outside: {said}' if said else ''}",
    )
    log_of_steps = recording.recorder
    if log_of_steps is not None:
        gone = recording.steps.height - steps.height
        fewer = {name: int(log_of_steps[name] or 0) - gone for name in ("steps", "counted_steps")}
        log_of_steps = {**log_of_steps, **fewer}
    tokens, prefix = recording.token_events, recording.prefix
    rate = recording.prefix_hit_rate
    return replace(
        recording,
        requests=rows_of(part.moved(requests.filter(mine))),
        token_events=tokens
        and replace(tokens, offsets=tokens.offsets[mine], counts=tokens.counts[mine], zero_us=tokens.zero_us + begin),
        prefix=prefix and replace(prefix, requests=part.moved(prefix.requests).drop_nulls("request_index")),
        clocks=tuple(
            replace(c, zero_us=c.zero_us + begin, stamped_zero_us=c.stamped_zero_us and c.stamped_zero_us + begin)
            for c in recording.clocks
        ),
        steps=rows_of(part.moved(steps)),
        snapshots=rows_of(part.moved(snapshots)),
        lifecycles=rows_of(own.drop("before")),
        journey_events=rows_of(events),
        iterations=rows_of(part.moved(log)),
        recorder=log_of_steps,
        stages=tuple(_stages(recording.stages, requests, mine)),
        aggregates=_counters(recording.aggregates, with_report),
        prefix_hit_rate=rate if rate == 0 else None,  # it covers all requests; 0 of all is 0 of these
        missing=(*recording.missing, *remarks),
        findings=(
            *recording.findings,
            *others_in_flight(
                Counter(names[beside]),
                int(mine.sum()),
                "were in flight during this part",
                "begin and end the part where the server was idle",
            ),
        ),
    )


def _room(gaps_us: Int64s) -> int:
    """How far around the part what the server did is surely its own: half of the pause to others, us."""
    return min(_MARGIN_US, max(int(gaps_us[gaps_us >= 0].min()) // 2, 0)) if (gaps_us >= 0).any() else _MARGIN_US


def _stages(stages: Iterable[Stage], requests: pl.DataFrame, mine: Bools) -> Iterable[Stage]:
    """Load stages of the part; one that it cuts lasts from the first of its sends in the part to the last."""
    for stage in stages:
        of_stage = (requests["stage"] == stage.stage).fill_null(False).to_numpy()
        sent_us = requests["arrival_us"].to_numpy()[of_stage & mine]
        if len(sent_us):
            cut = len(sent_us) < of_stage.sum()
            yield replace(stage, duration_us=max(int(np.ptp(sent_us)), 1)) if cut else stage


def _counters(aggregates: pl.DataFrame, with_report: bool) -> pl.DataFrame:
    """What the server counted of all requests, as bounds of what it served of some; its mean latencies are of all."""
    of_server = pl.col("metric").str.starts_with("server_")
    kept = aggregates.filter(pl.when(of_server).then(pl.col("statistic").is_in(_COUNTERS)).otherwise(with_report))
    one = pl.when(pl.col("metric") == "server_snapshots").then(1.0).otherwise("value")
    return kept.with_columns(one.alias("value"))


def others_in_flight(beside: Counter[str], own: int, when: str, remedy: str) -> Iterable[Finding]:
    """What requests of others mean that were in flight with the ``own``, by file."""
    if not beside:
        return
    named = ", ".join(f"{count:,} of {name}" for name, count in sorted(beside.items()))
    message = f"requests of others {when}, and are not replayed: {named}"
    many = beside.total() > max(OTHERS * own, FEW_OTHERS)
    if many:
        message += f"; what can be replayed is not what was served: {remedy}"
    yield Finding(CHECK, "unusable" if many else "note", "", message, {**beside, "requests": own}, RULE)


_LATENCIES = ("ttft_us", "e2e_us")
_SAME_US, _ROUNDED_US = 100, 10_000  # between the latencies of a request in two files; at most, where one is rounded


def others_among(read: RequestsRead, unread: RequestsRead) -> tuple[int, bool]:
    """How many requests of a file that is not read were in flight with those read, or may have been.

    And whether a clock says so.  Requests with the same latencies are the same ones; lengths and ids tell nothing, as
    two clients may send one dataset and count from 0.  Requests without latencies are a load that was to be sent.
    """
    frames = [of.rows.frame(["sent_us", *_LATENCIES]) for of in (read, unread)]
    timed = [name for name in _LATENCIES if all(frame[name].count() for frame in frames)]
    mine, others = (frame.drop_nulls(timed) for frame in frames)
    if not timed or (read.placed.startswith(REBUILT) and unread.placed.startswith(REBUILT)):
        return 0, False
    near, units = np.zeros(others.height, np.bool_), []
    for name in timed:
        rounded_us = max(int(np.gcd.reduce(frame[name].to_numpy())) for frame in (mine, others))
        units.append(min(max(_SAME_US, rounded_us), _ROUNDED_US))
    known = _keys(mine, timed, units, (0, 0))
    for shift in product((-1, 0, 1), repeat=len(timed)):
        near |= np.isin(_keys(others, timed, units, shift), known)
    others = others.filter(~near)
    if read.clock_kind != unread.clock_kind or read.clock_kind == "relative":
        return others.height, False
    begin, end = mine["sent_us"].min(), (mine["sent_us"] + mine[timed[-1]]).max()
    beside = (others["sent_us"] <= end) & (others["sent_us"] + others[timed[-1]] >= begin)
    return int(beside.sum()), True


def _keys(frame: pl.DataFrame, names: Sequence[str], units: Sequence[int], shift: Sequence[int]) -> Int64s:
    """A number per row: rows are equal in all columns, to a unit, if their numbers are; ``shift`` is in units."""
    keys = np.zeros(frame.height, np.int64)
    for name, unit, moved in zip(names, units, shift, strict=False):
        keys = (keys << 31) + frame[name].to_numpy() // unit + moved
    return keys
