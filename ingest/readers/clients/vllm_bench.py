"""``vllm bench serve --save-result --save-detailed``: one object per run, with an array for each column.

``--append-result`` puts one object after the other; each is a load stage here.  Arrays are in seconds, aggregates in
milliseconds.  A stream event is stamped once, and E2E goes to the last one: ``ttft + sum(itls)``, which later releases
(0.32) also write as ``latencies``.  For chat the first event carries the role and no token, and ``itls`` begins with
the gap behind it.  The prompt length is the server's from 0.20 on; up to 0.15 it is the client's own count, without the
tokens that a server puts before a prompt (BOS).  ``queue_times`` (0.32) is how long the client held a request back.

Start times are written since January 2026.  Where a file has none, but its client held N requests in flight
(``--max-concurrency``), they follow: requests take free slots in file order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.documents import (
    US_PER_MS,
    US_PER_S,
    WHOLE_RUN,
    Reported,
    finite,
    may_be_equal,
    microseconds,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.records import JsonPath, place_of, wanted_values
from blis_replay.ingest.readers.requests import (
    Request,
    RequestsRead,
    ServerFacts,
    UnusableError,
    failure,
    gathered,
    request_row,
    stage_of_sends,
)
from blis_replay.ingest.recording import REBUILT, REBUILT_E2E, Stage

_COLUMNS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_SCALARS = {
    *("backend", "model_id", "request_rate", "max_concurrency", "duration", "request_throughput"),
    *("num_prompts", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("probe_completed", "probe_failed", "total_input_sequences", "burstiness", "dataset_name", "random_range_ratio"),
}
_STATISTIC = re.compile(r"(mean|median|p\d{1,2}(?:\.\d{1,4})?)_(ttft|tpot|itl|e2el|e2e_latency)_ms", re.ASCII)
_METRICS = {"ttft": "ttft", "tpot": "tpot_reported", "itl": "itl_reported", "e2el": "e2e", "e2e_latency": "e2e"}
# A server counts at least one token for an event.  More requests than this share with fewer: the client counted.
_UNDERCOUNTED = 0.05
# A request that waits longer for a free slot of --max-concurrency than an event loop takes was held back.
_HELD_BACK_S = 0.05
# With a rate and --max-concurrency the cap held if the achieved share of the rate is below the first, and on average at
# least the second share of the cap was in flight.  Else the run was short, or its server slow.
_ACHIEVED, _IN_FLIGHT = 0.9, 0.75
_LONGEST_S = 1e9
# Requests whose total of output tokens is a multiple of their number have equal lengths, by chance one run in 20 of
# the shortest that this is asked of.
_MANY = 20
# Rebuilt send times are refused where the run would end further from its stated duration than this share.  Those of two
# recorded sweeps (gpt-oss-120b on an H200, 4 and 64 clients) end 0.1 and 0.7 % from it.
_REBUILT_WITHIN = 0.05
_REBUILT_FROM_S = 1.0  # not 0, which is the start time of a request that was never sent
# An empty object is a run, and an empty array of gaps a request, so a small file could have any number.
MAX_RUNS = 10_000
MAX_REQUESTS = 2_000_000


@dataclass
class _Run:
    """One object of the file: its scalars, and its columns by request.

    The column ``itls`` has, per request, the place of its gaps in the flat file and their number.  ``held_back``:
    requests that the client itself delayed, the longest by ``longest_s``.  ``placed``: how start times were rebuilt;
    ``e2es_s``: rebuilt with them if gaps are missing; ``unplaced``: why requests have no place.
    """

    scalars: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    held_back: int = 0
    longest_s: float = 0.0
    placed: str = ""
    e2es_s: list[float] = field(default_factory=list)
    unplaced: str = "no start time (vllm writes start_times since January 2026, SGLang none), so it cannot be placed"

    def requests(self) -> int:
        return max(map(len, self.columns.values()))

    def value(self, column: str, i: int) -> Any:
        values = self.columns[column]
        return values[i] if i < len(values) else None


recognises = begins_with(b"{", "tokenizer_id", "num_prompts")


recognises_sglang = begins_with(b"{", "backend", "total_output_tokens_retokenized", "request_throughput")


def read_sglang(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The same form with other names; SGLang (to 0.5) writes no start times, so without a cap there are aggregates."""
    read = read_requests(file, stamps_path)
    lacks = f"requests: SGLang does not say when it sent them, so they cannot be placed; {file.name} has aggregates"
    return replace(read, version="sglang bench_serving", lacks=() if read.rows.height else (lacks,))


def sglang_server(file: RecordedFile) -> ServerFacts:
    """What SGLang's server says of itself in the first result of a file (``server_info``)."""
    read_again = RecordedFile(file.path, file.name)  # what is wrong with the file is counted when its requests are read
    found = wanted_values(read_again, lambda path: path == (0, "server_info"))
    said: object = next((value for _path, value in found), {})
    model = text(documents.at(said, "served_model_name", "model_path"))
    return ServerFacts(model, tokens(documents.at(said, "tp_size")), name="server_info of SGLang")


def read_requests(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order, a load stage for each object; stamps go to the flat file ``stamps_path``.

    Times are on the client's monotonic clock.  The E2E of a failed request is the time to its last stream event, null
    if it had none.  Without ``--save-detailed`` there are only aggregates; requests without ``start_times`` that cannot
    be rebuilt are rejected.  A length is the server's where it is not below the count of events.
    """
    gaps_path = stamps_path.with_suffix(".gaps")
    with gaps_path.open("wb") as stream:
        runs = _read_runs(file, stream)
    gaps_s = np.memmap(gaps_path, np.float64, "r") if gaps_path.stat().st_size else np.empty(0)
    begin_s = _REBUILT_FROM_S
    for run in [] if any(run.columns["start_times"] for run in runs) else runs:  # one clock has all sends
        begin_s = _rebuild(run, gaps_s, begin_s)
    records = (
        (f"request {i}" if len(runs) == 1 else f"document {stage + 1}, request {i}", (stage, i))
        for stage, run in enumerate(runs)
        for i in range(run.requests())
    )
    by_server = [_counted_by_server(run) for run in runs]
    rows, events = gathered(
        file, records, lambda place: _request(runs[place[0]], *place, gaps_s, by_server[place[0]]), stamps_path
    )
    aggregates = documents.aggregate_frame(
        (stage, *reported)
        for number, run in enumerate(runs)
        for reported in _reported(file, run.scalars)
        for stage in ((number, WHOLE_RUN) if len(runs) == 1 else (number,))
    )
    file.tally.records = rows.height or len(aggregates)
    first = runs[0].scalars if runs else {}
    undetailed = f"requests: {file.name} was written without --save-detailed and has aggregates only"
    return RequestsRead(
        rows,
        "client",
        "monotonic",
        text(first.get("model_id")),
        events,
        version=f"vllm bench serve ({text(first.get('backend')) or 'backend unknown'})",
        stages=tuple(stage for i, run in enumerate(runs) if (stage := _stage(i, run))),
        aggregates=aggregates,
        remarks=tuple(remark for run in runs for remark in _remarks(file, run)),
        lacks=() if any(run.requests() for run in runs) else (undetailed,),
        placed=max((run.placed for run in runs), key=len, default=""),
    )


def _wanted(path: JsonPath) -> bool:
    if len(path) == 2:
        return path[1] in _SCALARS or bool(_STATISTIC.fullmatch(str(path[1])))
    return len(path) == 3 and path[1] in (*_COLUMNS, "queue_times") and isinstance(path[2], int)


def _read_runs(file: RecordedFile, stream: BinaryIO) -> list[_Run]:
    runs: list[_Run] = []
    written = 0
    for path, value in wanted_values(file, _wanted):
        if int(path[0]) >= MAX_RUNS or int(path[-1] if len(path) == 3 else 0) >= MAX_REQUESTS:
            problem = f"more than {MAX_RUNS:,} runs, or {MAX_REQUESTS:,} requests"
            raise RecordingError(file.path, place_of(path), problem, "split the file")
        while len(runs) <= int(path[0]):
            runs.append(_Run())
        run, column = runs[-1], str(path[1])
        if len(path) == 2:
            run.scalars[column] = _plain(value)
        elif column == "itls":
            gaps = _gaps(value)
            run.columns[column].append(None if gaps is None else (written, len(gaps)))
            if gaps is not None:
                stream.write(gaps.tobytes())
                written += len(gaps)
        elif column == "queue_times":
            queued_s = finite(value) or 0.0
            run.held_back += queued_s > _HELD_BACK_S
            run.longest_s = max(run.longest_s, queued_s)
        else:
            run.columns[column].append(_plain(value))
    return runs


def _rebuild(run: _Run, gaps_s: Floats, begin_s: float) -> float:
    """Write start times from ``begin_s`` on to a run whose client held N requests in flight.

    Without gaps between events the E2E of a request is its TTFT and the mean TPOT of the file.  Returns the end.
    """
    names = ("max_concurrency", "duration", "mean_tpot_ms")
    cap, stated_s, tpot_ms = (max(finite(run.scalars.get(name)) or 0.0, 0.0) for name in names)
    paced = not isinstance(run.scalars.get("request_rate"), str)
    has_gaps = any(placed is not None for placed in run.columns["itls"])
    if cap < 1 or not stated_s or not (has_gaps or tpot_ms) or (paced and not _cap_held(run.scalars)):
        return begin_s
    rate_per_s = finite(run.scalars.get("request_rate")) if paced else None
    sent_s: list[float] = []
    e2es_s: list[float] = []
    ends_s: list[float] = []  # of those in flight, a heap
    for i in range(run.requests()):
        first, count = run.value("itls", i) or (0, 0)
        gap_s = float(gaps_s[first : first + count].sum())
        if not has_gaps:
            gap_s = tpot_ms / 1000 * max((whole(run.value("output_lens", i)) or 0) - 1, 0)
        # In whole us, as it is kept: the next request of this client is sent when this one ends, not 1 us before.
        e2es_s.append(round(max(finite(run.value("ttfts", i)) or 0.0, 0.0) + gap_s, 6))
        free_s = heappop(ends_s) if len(ends_s) >= cap else 0.0
        sent_s.append(max(free_s, i / rate_per_s if rate_per_s else 0.0))
        heappush(ends_s, sent_s[-1] + e2es_s[-1])
    took_s = max(ends_s, default=0.0)
    if abs(took_s / stated_s - 1) > _REBUILT_WITHIN:
        took = f"{cap:,.0f} in flight would have taken {took_s:,.1f} s, not the {stated_s:,.1f} s of the file"
        run.unplaced = f"no start time, and {took}"
        return begin_s
    run.columns["start_times"] = [begin_s + second for second in sent_s]
    run.placed, run.e2es_s = (REBUILT, []) if has_gaps else (REBUILT_E2E, e2es_s)
    return begin_s + took_s


def _remarks(file: RecordedFile, run: _Run) -> Iterator[str]:
    """What the server did for the client in this run, and the file does not tell request by request."""
    if run.placed:
        yield f"send times: {run.placed} ({run.scalars['max_concurrency']:,} at once)"
    probes = sum(whole(run.scalars.get(key)) or 0 for key in ("probe_completed", "probe_failed"))
    if probes:
        yield f"{probes} probe requests (--probe-request-rate), which the server had too and {file.name} does not time"
    if run.held_back:
        yield (
            f"the load as planned: {file.name} held {run.held_back} requests back for a free slot "
            f"(--max-concurrency), up to {run.longest_s:.3g} s; arrivals are the times when they were sent"
        )


def _plain(value: object) -> object:
    """A number, or the end of a text (of a traceback, the last line says what happened); of all else, that it is."""
    if isinstance(value, str):
        return value.strip()[-500:]
    return value if value is None or isinstance(value, int | float) else ()


def _gaps(value: object) -> Floats | None:
    """Seconds from the event before to each stream event, 0 for the first; ``None`` if one is not a usable time."""
    if not isinstance(value, list) or not all(type(gap) in (int, float) and 0 <= gap < _LONGEST_S for gap in value):
        return None
    gaps = np.array([0.0, *value], np.float64)
    return gaps if gaps.sum() < _LONGEST_S else None


def _request(run: _Run, stage: int, i: int, gaps_s: Floats, by_server: bool) -> Request:
    sent_us, ttft_us = (microseconds(run.value(column, i)) for column in ("start_times", "ttfts"))
    placed = run.value("itls", i)
    if run.scalars.get("total_input_sequences") is not None:
        raise UnusableError("a pooling request, which has no output tokens")
    if not sent_us or sent_us < 0:  # 0: it was never sent
        raise UnusableError(run.unplaced)
    if ttft_us is None or not 0 <= ttft_us < _LONGEST_S * US_PER_S:
        raise UnusableError("a ttft that is not a usable time")
    if placed is None and not run.e2es_s:
        raise UnusableError("itls that are not usable times")
    first, count = placed if placed and ttft_us else (0, 0)  # without a TTFT no event came
    after_us = np.rint(np.cumsum(gaps_s[first : first + count]) * US_PER_S).astype(np.int64)
    error, counted = text(run.value("errors", i)), whole(run.value("output_lens", i))
    # A failed request has length 0, also where the file was cut off before the errors.
    status = "ok" if error is None and counted else failure(error)
    rebuilt_us = microseconds(run.e2es_s[i]) if run.e2es_s and status == "ok" else None
    row = request_row(
        sent_us,
        status,
        error,
        stage=stage,
        prompt_tokens=tokens(run.value("input_lens", i)),
        output_tokens_reported=counted,
        usage_output_tokens=counted if by_server else None,
        ttft_us=ttft_us,
        e2e_us=ttft_us + int(after_us[-1]) if count else rebuilt_us,
    )
    return row, sent_us + ttft_us + after_us


def _counted_by_server(run: _Run) -> bool:
    """Whether the lengths are the server's: a count below that of the events can only be the client's own."""
    placed = zip(run.columns["output_lens"], run.columns["itls"], strict=False)
    counts = [(length, events[1]) for reported, events in placed if (length := whole(reported)) and events is not None]
    # One event may carry the role.
    undercounted = sum(1 for length, events in counts if length < events - 1)
    return undercounted <= _UNDERCOUNTED * len(counts)


def _stage(number: int, run: _Run) -> Stage | None:
    """The run as a load stage; its rate is the achieved one where none was asked for (``inf``) or the cap held.

    At a rate that was asked for it ends with the last send: vLLM scales the gaps between sends to that.
    """
    duration_us = microseconds(run.scalars.get("duration"))
    asked = run.scalars.get("request_rate")
    unpaced = isinstance(asked, str) or _cap_held(run.scalars)
    rate_per_s = finite(run.scalars.get("request_throughput") if unpaced else asked)
    if not duration_us or duration_us < 0 or rate_per_s is None or rate_per_s <= 0:
        return None
    return stage_of_sends(number, rate_per_s, duration_us, None if unpaced else finite(_sent(run.scalars)))


def _cap_held(scalars: dict[str, Any]) -> bool:
    """Whether --max-concurrency, not the rate that was asked for, set the pace of the requests.

    By Little's law the achieved rate times the mean E2E is how many were in flight on average.
    """
    names = ("request_rate", "max_concurrency", "request_throughput", "mean_ttft_ms")
    rate_per_s, cap, achieved_per_s, ttft_ms = (finite(scalars.get(name)) for name in names)
    if not (rate_per_s and cap and achieved_per_s and ttft_ms) or achieved_per_s >= _ACHIEVED * rate_per_s:
        return False
    e2e_ms = finite(scalars.get("mean_e2el_ms"))
    if e2e_ms is None:
        output_tokens, completed = finite(scalars.get("total_output_tokens")), finite(scalars.get("completed"))
        tpot_ms = finite(scalars.get("mean_tpot_ms"))
        if not (output_tokens and completed and tpot_ms):
            return False
        e2e_ms = ttft_ms + tpot_ms * (output_tokens / completed - 1)
    return achieved_per_s * e2e_ms / 1000 >= _IN_FLIGHT * cap


def _sent(scalars: dict[str, Any]) -> Any:
    """How many requests the tool sent.

    ``num_prompts`` is what it was asked for; a data set may make fewer (``prefix_repetition`` makes whole groups only).
    """
    ended = [whole(scalars.get(key)) for key in ("completed", "failed")]
    return scalars.get("num_prompts") if None in ended else sum(count for count in ended if count is not None)


def _reported(file: RecordedFile, scalars: dict[str, Any]) -> Iterator[Reported]:
    counts = {"sent": _sent(scalars), "succeeded": scalars.get("completed"), "failed": scalars.get("failed")}
    for statistic, count in counts.items():
        yield from documents.reported_number(file, "requests", statistic, count)
    # `inf`: all at once, or as many as are allowed.
    if isinstance(scalars.get("request_rate"), str) or _cap_held(scalars):
        clients = scalars.get("max_concurrency") or _sent(scalars)
        yield from documents.reported_number(file, "concurrency", "asked", clients)
    yield from documents.reported_number(file, "burstiness", "asked", scalars.get("burstiness"))
    shortest = finite(scalars.get("random_range_ratio"))
    if scalars.get("dataset_name") == "random" and shortest is not None and 0 <= shortest <= 1:
        # SGLang draws lengths between this share of the longest and the longest, evenly.
        yield from documents.reported_number(file, "lengths", "spread", (1 - shortest) / (1 + shortest))
    completed = tokens(scalars.get("completed")) or 0
    slow_ms, usual_ms = (finite(scalars.get(name)) or 0.0 for name in ("p99_e2el_ms", "median_e2el_ms"))
    divides = completed >= _MANY and not (tokens(scalars.get("total_output_tokens")) or 1) % completed
    if divides and shortest is None and may_be_equal(slow_ms, usual_ms):
        yield from documents.reported_number(file, "lengths", "spread", 0)
    for metric, key in (("prompt_tokens", "total_input_tokens"), ("output_tokens_reported", "total_output_tokens")):
        if completed:
            yield from documents.reported_number(file, metric, "mean", scalars.get(key), 1 / completed)
    of_metric: dict[str, dict[str, Any]] = {}
    for key, value in scalars.items():
        if match := _STATISTIC.fullmatch(key):
            of_metric.setdefault(_METRICS[match[2]], {})[match[1]] = value
    for metric, statistics in of_metric.items():
        yield from documents.distribution(file, metric, statistics, US_PER_MS)
