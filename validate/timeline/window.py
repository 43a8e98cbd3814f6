"""A window of a run, observed and simulated on one clock, for a trace viewer.

::

    shown = timeline(run, from_us=600_000_000, until_us=605_000_000)
    shown.lanes, shown.steps, shown.counters       # polars frames
    write_timeline(shown, Path("trace.json"))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.errors import NothingToJudgeError, ValidateError, counted
from blis_replay.ingest.recording import ESTIMATED, IDENTITIES, PUBLISHED, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.observed import on_both_sides
from blis_replay.validate.text.answer import Answer, Block
from blis_replay.validate.text.cells import time_text
from blis_replay.validate.timeline.lanes import (
    SIDES,
    SIMULATED,
    observed_lanes,
    observed_preemptions,
    simulated_lanes,
    simulated_preemptions,
    with_preemptions,
)
from blis_replay.validate.timeline.steps import (
    COUNTER_SCHEMA,
    COUNTERS,
    ERROR,
    LOGGED,
    observed_counters,
    observed_steps,
    simulated_counters,
    simulated_steps,
    with_true_split,
)

DEFAULT_LENGTH_US = 5_000_000
MOST_EVENTS = 200_000  # a viewer in a browser stays quick up to some such number


@dataclass(frozen=True)
class Timeline:
    """A window of a run, us from the experiment's zero.

    ``lanes``: ``LANE_SCHEMA``, ``steps``: ``STEP_SPAN_SCHEMA``: all that reach into the window, with their whole
    times.  ``counters``: ``COUNTER_SCHEMA``, and of each the last value before the window.  ``request_ids``:
    the recording's names of the requests of the lanes.  ``absent``: what was not recorded, in words;
    ``remarks``: what to know of what was.  ``worst``: the request with the largest error, if the window is about it.
    """

    alias: str
    from_us: int
    until_us: int
    lanes: pl.DataFrame
    steps: pl.DataFrame
    counters: pl.DataFrame
    request_ids: dict[int, str | None]
    absent: tuple[str, ...]
    remarks: tuple[str, ...]
    worst: int | None = None

    @property
    def events(self) -> int:
        """Segments, steps and counter values."""
        return self.lanes.height + self.steps.height + self.counters.height


def timeline(
    run: ReplayRun, from_us: int = 0, until_us: int | None = None, request_index: int | None = None
) -> Timeline:
    """The window of a replay and its recording; ``until_us``: ``DEFAULT_LENGTH_US`` later if None.

    ``request_index``: the only request that has lanes; None: all of the window.  Raises ``NothingToJudgeError`` if
    nothing lies in the window, ``ValidateError`` if it holds more than ``MOST_EVENTS``, ``ReplayError`` if the
    simulator reports no steps.
    """
    recording = run.recording
    window = from_us, from_us + DEFAULT_LENGTH_US if until_us is None else until_us
    observed, absent = observed_lanes(run)
    calls, steps = observed_steps(recording)
    observed_spans = steps
    counters = pl.concat([observed_counters(recording, window), simulated_counters(run, window)])
    lanes = (_of(request_index, observed), _of(request_index, simulated_lanes(run)))
    spans = [*lanes, steps, simulated_steps(run, window)]
    counters = pl.concat([counters, _errors(*lanes)])
    _refuse(recording.alias, window, spans, counters)
    observed, simulated, steps, simulated_batches = (_reaching_into(frame, window) for frame in spans)
    preempted = (_of(request_index, observed_preemptions(recording, calls)), simulated_preemptions(run))
    both = (with_preemptions(observed, preempted[0]), with_preemptions(simulated, _of(request_index, preempted[1])))
    shown = pl.concat(both)
    ids = recording.requests.frame(["request_index", "request_id"])
    chosen = ids.filter(pl.col("request_index").is_in(shown["request_index"].unique().implode()))
    return Timeline(
        alias=recording.alias,
        from_us=window[0],
        until_us=window[1],
        lanes=_reaching_into(shown, window),
        steps=pl.concat([with_true_split(steps, recording), simulated_batches]),
        counters=_values_in(counters, window),
        request_ids=dict(chosen.iter_rows()),
        absent=(*absent, *_absent(observed_spans, counters)),
        remarks=_remarks(recording, observed_spans),
    )


def _errors(observed: pl.DataFrame, simulated: pl.DataFrame) -> pl.DataFrame:
    """``COUNTER_SCHEMA``: the error of E2E of every request with lanes on both sides, at its send."""
    ends = [
        lanes.group_by("request_index").agg(pl.col("start_us").min(), pl.col("end_us").max())
        for lanes in (observed, simulated)
    ]
    both = ends[0].join(ends[1], on="request_index", suffix="_simulated").sort("start_us", "request_index")
    error_us = pl.col("end_us_simulated") - pl.col("start_us_simulated") - pl.col("end_us") + pl.col("start_us")
    values = {
        "side": pl.lit(SIMULATED),
        "counter": pl.lit(ERROR),
        "at_us": pl.col("start_us"),
        "value": error_us / 1000,
    }
    return both.select(value.cast(COUNTER_SCHEMA[name]).alias(name) for name, value in values.items())


def _of(request_index: int | None, frame: pl.DataFrame) -> pl.DataFrame:
    return frame if request_index is None else frame.filter(pl.col("request_index") == request_index)


def request_named(recording: Recording, name: str) -> int:
    """The index of the request of that id, or of that index written out.

    Raises ``ValidateError`` for an unknown id, and for one that several requests have.
    """
    ids = recording.requests.frame(["request_index", "request_id"])
    found = ids.filter(pl.col("request_id") == name)["request_index"].to_list()
    if not found and name.isdecimal():
        found = ids.filter(pl.col("request_index") == int(name))["request_index"].to_list() if len(name) < 19 else []
    if len(found) == 1:
        return int(found[0])
    if found:
        raise ValidateError(
            f"{recording.alias}: {len(found):,} requests have the id {name!r}; "
            f"name one by its index, such as {found[0]}"
        )
    raise ValidateError(
        f"{recording.alias}: no request has the id {name!r}; "
        f"name one of its ids, or an index from 0 to {ids.height - 1}"
    )


def worst_request(run: ReplayRun) -> int:
    """The request whose E2E is wrong by the most time; raises ``NothingToJudgeError`` without recorded latencies."""
    compared = on_both_sides(run)
    if not compared.any():
        raise NothingToJudgeError(
            f"{run.recording.alias}: no latencies of single requests were recorded; choose the window with --from"
        )
    observed_us = run.recording.requests["e2e_us"].to_numpy()[compared]
    return int(np.flatnonzero(compared)[np.argmax(np.abs(run.e2e_us[compared] - observed_us))])


@dataclass(frozen=True)
class Window:
    """A part of a run, us.

    ``request_index``: the only request whose lanes are wanted; ``remark``: why this part; ``worst``: the request that
    it is about, whose lanes come first.
    """

    from_us: int
    until_us: int
    request_index: int | None = None
    remark: str = ""
    worst: int | None = None


def window_named(
    run: ReplayRun, from_us: int | None, length_us: int | None, around: str | None, request: str | None
) -> Window:
    """The window that was asked for: from a time on, or from the send of a request (the ``worst``, or one by name).

    Raises as ``worst_request`` and ``request_named`` do.
    """
    if around is None and request is None:
        begin_us = from_us or 0
        return Window(begin_us, begin_us + (DEFAULT_LENGTH_US if length_us is None else length_us))
    index = worst_request(run) if request is None else request_named(run.recording, request)
    sent_us, end_us = _times_of_request(run, index)
    margin_us = max((end_us - sent_us) // 10, 1000)
    low_us, high_us = max(sent_us - margin_us, 0), end_us + margin_us
    if length_us is not None:
        low_us, high_us = sent_us, sent_us + length_us
    if request is not None:
        return Window(low_us, high_us, index)
    error_us = float(run.e2e_us[index]) - float(run.recording.requests["e2e_us"].to_numpy()[index])
    side = "longer" if error_us > 0 else "shorter"
    remark = f"request {index} is off by the most time: its E2E is {time_text(abs(error_us))} {side} in the replay"
    return Window(low_us, high_us, None, remark, index)


def _times_of_request(run: ReplayRun, request_index: int) -> tuple[int, int]:
    """Its send, and its end on the side where it ends last, us."""
    lanes = pl.concat([observed_lanes(run)[0], simulated_lanes(run)]).filter(pl.col("request_index") == request_index)
    if lanes.is_empty():
        raise NothingToJudgeError(
            f"{run.recording.alias}: nothing is known of the times of request {request_index}; choose another one"
        )
    start_us, end_us = lanes.select(pl.col("start_us").min(), pl.col("end_us").max()).row(0)
    return start_us, end_us


def timeline_answer(shown: Timeline, path: Path) -> Answer:
    """What a file holds, in a line, and what to know of it; ms for programs."""
    counts = {"requests": len(shown.request_ids)}
    counts |= {f"{side}_steps": int((shown.steps["side"] == side).sum()) for side in SIDES}
    line = (
        f"{path}: {shown.alias} from {shown.from_us / 1e6:g} s to {shown.until_us / 1e6:g} s, "
        f"{counted(counts['requests'], 'request')}, {counts['observed_steps']:,} observed and "
        f"{counts['simulated_steps']:,} simulated steps"
    )
    document = {
        "alias": shown.alias,
        "file": str(path),
        "from_ms": shown.from_us / 1000,
        "until_ms": shown.until_us / 1000,
        "events": shown.events,
        **counts,
        "absent": list(shown.absent),
        "remarks": list(shown.remarks),
    }
    return Answer([Block([line, *shown.remarks, "open it at ui.perfetto.dev or in chrome://tracing"])], document)


def _reaching_into(frame: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    start, end = pl.col("start_us"), pl.col("end_us")
    return frame.filter(start < window[1], end > window[0], end > start)


def _values_in(counters: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    """Values within the window, and of each counter the one that holds at its begin."""
    at = pl.col("at_us")
    latest = at.filter(at <= window[0]).max().over("side", "counter")
    return counters.filter(at < window[1], (at > window[0]) | (at == latest).fill_null(False))


def _count(window: tuple[int, int], spans: list[pl.DataFrame], counters: pl.DataFrame) -> int:
    inside = pl.col("at_us").is_between(*window).sum()
    return sum(_reaching_into(frame, window).height for frame in spans) + int(counters.select(inside).item())


def _refuse(alias: str, window: tuple[int, int], spans: list[pl.DataFrame], counters: pl.DataFrame) -> None:
    count = _count(window, spans, counters)
    if not count:
        ends_us = max(int(frame["end_us"].max() or 0) for frame in spans)  # type: ignore[arg-type]
        raise NothingToJudgeError(
            f"{alias}: nothing happens from {window[0] / 1e6:g} s on for {(window[1] - window[0]) / 1e6:g} s; "
            f"the run ends at {ends_us / 1e6:.1f} s, choose an earlier --from"
        )
    if count <= MOST_EVENTS:
        return
    fits_us, too_long_us = 0, window[1] - window[0]
    while too_long_us - fits_us > max(fits_us // 100, 1):
        middle_us = (fits_us + too_long_us) // 2
        fits = _count((window[0], window[0] + middle_us), spans, counters) <= MOST_EVENTS
        fits_us, too_long_us = (middle_us, too_long_us) if fits else (fits_us, middle_us)
    fitting = f"{fits_us // 1_000_000}s" if fits_us >= 2_000_000 else f"{fits_us // 1000}ms"
    raise ValidateError(
        f"{alias}: {(window[1] - window[0]) / 1e6:g} s hold {count:,} events, more than the {MOST_EVENTS:,} that a "
        f"viewer takes well; --for {fitting} would fit"
    )


def _absent(steps: pl.DataFrame, counters: pl.DataFrame) -> list[str]:
    absent = ["the observed step track"] if steps.is_empty() else []
    there = set(counters.select("side", "counter").unique().rows())
    return absent + [f"{side} {name}" for side in SIDES for name in COUNTERS if (side, name) not in there]


def _remarks(recording: Recording, steps: pl.DataFrame) -> tuple[str, ...]:
    remarks = []
    if not steps.is_empty() and steps["source"][0] == LOGGED:
        off_us = recording.iterations.frame()["uncertainty_us"].to_numpy()
        mean_ms = float(np.nanmean(off_us)) / 1000
        remarks.append(f"the log does not say when iterations began; their starts are known to {mean_ms:.1f} ms")
    for clock in recording.clocks:
        estimated = clock.name == "step" and clock.placed in (ESTIMATED, IDENTITIES) and not steps.is_empty()
        if estimated and clock.uncertainty_us is not None:
            remarks.append(f"the observed step track may be {clock.uncertainty_us / 1000:.1f} ms off the lanes")
    if recording.ground_truth == PUBLISHED:
        remarks.append("requests are reconstructed from published aggregates")
    return tuple(remarks)
