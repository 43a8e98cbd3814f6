"""GuideLLM's CSV: a row for each load level, without single requests; what is kept are the aggregates of one level."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.clients.guidellm import TPOT, TPOT_OF_0_3
from blis_replay.ingest.readers.documents import (
    US_PER_MS,
    US_PER_S,
    WHOLE_RUN,
    aggregate_frame,
    at,
    finite,
    microseconds,
    section,
    text,
)
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.requests import RequestsRead, no_requests
from blis_replay.ingest.recording import Stage
from blis_replay_labs.formats.load_levels import several_levels

_LONGEST_US = 1e15
# Three header lines from 0.4 on, one in 0.3, and a row for each load level.
_GUIDELLM, _GUIDELLM_0_3 = b"Run Info,Run Info,", b"Type,Run Id,Id,Name,"
# The table is read again for each level, as each is an experiment of its own; a sweep has ten, of 8 kB each.
_MOST_TABLE_BYTES = 4 << 20
MOST_POINTS = 200
_POINT_QUANTILES = ("min", "p0.1", "p1", "p5", "p10", "p25", "p75", "p90", "p95", "p99", "max")
# Metric, unit, and the group and the column of its statistics from 0.4 on, or its name in 0.3.
_POINT_METRICS = (
    ("e2e", US_PER_S, ("Request Latency", "Successful Sec"), "Request latency"),
    ("ttft", US_PER_MS, ("Time to First Token", "Successful ms"), "Time to first token ms"),
    ("itl_reported", US_PER_MS, ("Inter Token Latency", "Successful ms"), "Inter token latency ms"),
    ("tpot", US_PER_MS, ("Time per Output Token", "Successful ms"), "Time per output token ms"),
    ("prompt_tokens", 1.0, ("Token Metrics", "Successful Input Tokens"), "Prompt token count"),
    ("output_tokens_reported", 1.0, ("Token Metrics", "Successful Output Tokens"), "Output token count"),
)
# Column -> its group, name and unit from 0.4 on, and its name in 0.3.
_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "succeeded": (("Request Counts", "Successful", ""), ("Successful Requests",)),
    "failed": (("Request Counts", "Errored", ""), ("Errored Requests",)),
    "sent": (("Request Counts", "Total", ""), ("Total Requests",)),
    "duration": (("Timings", "Duration", "Sec"), ("Duration",)),
    "strategy": (("Benchmark", "Strategy", ""), ("",)),
    "server": (("Run Info", "Backend", ""), ("Worker",)),
}


@dataclass(frozen=True)
class _Point:
    """A load level: its cells by column (group, column, statistic of 0.4; its name in 0.3), and what was asked for."""

    cells: Mapping[tuple[str, ...], str]
    strategy: Mapping[str, Any]
    old: bool

    def cell(self, column: str) -> str | None:
        return self.cells.get(_COLUMNS[column][self.old])

    def clients(self) -> float | None:
        """Of a closed loop: its clients; all at once are as many as there were requests, or as were allowed."""
        kind = self.strategy.get("type_") or self.cell("strategy")
        if kind == "synchronous":
            return 1.0
        if kind == "concurrent":
            return finite(self.strategy.get("streams"))
        if kind == "throughput":
            limits = (finite(self.strategy.get("max_concurrency")), finite(self.cell("sent")))
            return min((limit for limit in limits if limit), default=None)
        return None

    def statistics(self, group: tuple[str, str], name: str) -> Iterator[tuple[str, float | None]]:
        """Statistics of a metric; those of no request are not written, or (0.3) all 0."""
        columns: list[tuple[str, ...]]
        listed: tuple[str, ...]
        if self.old:
            columns = [(f"Successful {name} {key}",) for key in ("mean", "median")]
            listed = next((c for c in self.cells if c[0].startswith(f"Successful {name} [")), ("",))
        else:
            columns, listed = [(*group, key) for key in ("Mean", "Median")], (*group, "Percentiles")
        for statistic, column in zip(("mean", "p50"), columns, strict=True):
            yield statistic, finite(self.cells.get(column))
        quantiles = _parsed(self.cells.get(listed))
        if isinstance(quantiles, list) and len(quantiles) == len(_POINT_QUANTILES):
            yield from zip(_POINT_QUANTILES, map(finite, quantiles), strict=True)


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is GuideLLM's CSV."""
    return head.startswith((_GUIDELLM_0_3, _GUIDELLM))


def names_of_points(file: RecordedFile) -> list[str]:
    """An empty name for each load level of GuideLLM's CSV; raises as ``read_load_level``."""
    return [""] * len(_points(file))


def read_load_level(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """The aggregates of one load level, ``file.point``.

    Raises :class:`RecordingError` for a table of several where none is chosen: each is an experiment of its own.
    """
    points = _points(file)
    if len(points) != 1 and not 1 <= file.point <= len(points):
        raise several_levels(file, f"GuideLLM's CSV of {len(points)} load levels")
    line, point = points[max(file.point, 1) - 1]
    if point is None:
        raise RecordingError(
            file.path,
            f"line {line}",
            "other columns than its header has, as guidellm writes where requests failed at one load level only",
            "have guidellm write JSON as well (from 0.4: --outputs json) and give that",
        )
    file.tally.records = 1
    rows = list(_of_point(point))
    duration_us, sent = microseconds(point.cell("duration")), finite(point.cell("sent"))
    stages = []
    if duration_us and duration_us > 0 and sent:
        asked = finite(point.strategy.get("rate"))
        stages = [Stage(0, asked if asked and asked > 0 else sent / (duration_us / US_PER_S), duration_us)]
    return no_requests(
        f"guidellm {'0.3' if point.old else '0.4 or later'}",
        aggregate_frame((stage, *row) for row in rows for stage in (0, WHOLE_RUN)),
        f"requests: {file.name} has means and percentiles of whole load levels only",
        model=text(at(_parsed(point.cell("server")), "model", "backend_model")),
        stages=tuple(stages),
    )


def _points(file: RecordedFile) -> list[tuple[int, _Point | None]]:
    """The load levels with their lines; None where the columns are not those of the header."""
    content = file.content(_MOST_TABLE_BYTES)
    old = content.startswith(_GUIDELLM_0_3)
    heads = 1 if old else 3
    points: list[tuple[int, _Point | None]] = []
    header: list[list[str]] = []
    lines = csv.reader(io.StringIO(content.decode("utf-8", "replace"), newline=""), strict=True)
    try:
        for row in filter(None, lines):
            if len(header) < heads:
                header.append(row)
                continue
            points.append((lines.line_num, _point(header, row, old)))
            if len(points) > MOST_POINTS:
                raise RecordingError(file.path, "", f"more than {MOST_POINTS:,} load levels", "split the file")
    except csv.Error as error:
        raise RecordingError(file.path, f"line {lines.line_num}", f"no CSV ({error})", "copy the file again") from None
    if not points:
        raise RecordingError(file.path, "", "a header and no load level", "copy the file again")
    return points


def _point(header: Sequence[Sequence[str]], row: Sequence[str], old: bool) -> _Point | None:
    if any(len(line) != len(row) for line in header):
        return None
    cells = dict(zip(zip(*header, strict=True), row, strict=True))
    if old:
        return _Point(cells, section(_parsed(cells.get(("Args",))), "strategy"), old)
    profile, number = _parsed(cells.get(("Run Info", "Profile", ""))), cells.get(("Run Info", "Run Index", ""))
    return _Point(cells, section(profile, f"completed_strategies.{number}"), old)


def _of_point(point: _Point) -> Iterator[tuple[str, str, float]]:
    for statistic in ("succeeded", "failed", "sent"):
        if (count := finite(point.cell(statistic))) is not None and count >= 0:
            yield "requests", statistic, count
    if (clients := point.clients()) and clients >= 1:
        yield "concurrency", "asked", clients
    if not finite(point.cell("succeeded")):
        return
    for metric, unit, group, name in _POINT_METRICS:
        named = (TPOT_OF_0_3 if point.old else TPOT) if metric == "tpot" else metric
        for statistic, value in point.statistics(group, name):
            if value is not None and 0 <= value * unit < _LONGEST_US:
                yield named, statistic, value * unit


def _parsed(cell: str | None) -> object:
    try:
        return json.loads(cell or "null")
    except (ValueError, RecursionError):
        return None


FORMAT = RequestFormat("guidellm-csv", recognises, read=read_load_level, levels=names_of_points)
