"""A table of load levels, a row each: what a benchmark measured at a number of clients or at a rate.

No row says when its requests were sent, so each is an experiment of its own: aggregates, and what the row says of its
server.  Which column is what is said by its name, or by ``--columns``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from blis_replay.base.errors import RecordingError, printable
from blis_replay.ingest.readers.documents import (
    MAX_TOKENS,
    US_OF,
    US_PER_S,
    WHOLE_RUN,
    aggregate_frame,
    finite,
    quoted,
    quoted_value,
    text,
    tokens,
)
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.requests import RequestsRead, ServerFacts, no_requests
from blis_replay.ingest.readers.server.engine_arguments import ARGUMENTS
from blis_replay.ingest.readers.tables.columns import (
    COUNT,
    DURATION,
    FIELDS,
    TIMES,
    UNITS,
    WORD,
    Column,
    Columns,
    Field,
    given_columns,
    listed,
    recognised,
    value_of,
)
from blis_replay.ingest.readers.tables.records import Record, first_record, table_of
from blis_replay.ingest.recording import Stage

# For each row the table is read again.
MOST_LEVELS = 500
MOST_BYTES_OF_A_LEVEL = 1 << 20  # of a file that is one level; such a summary has a few KB
# Requests that are assumed where a row does not say how many there were: per client, or at a rate.
REQUESTS_PER_CLIENT = 10
REQUESTS_AT_A_RATE = 1_000
_LONGEST_US = 1e15
_METRICS = {"ttft": "ttft", "e2e": "e2e", "tpot": "tpot_reported", "itl": "itl_reported"}
# Statistic -> the words for it before or behind the name of a metric.
_STATISTICS = {
    **{"mean": ("mean", "avg", "average"), "p50": ("median", "p50")},
    **{name: (name,) for name in ("p25", "p75", "p90", "p95", "p99", "min", "max")},
}
_METRIC_NAMES = {
    "ttft": FIELDS["ttft"].names,
    "e2e": FIELDS["e2e"].names,
    "tpot": ("time_per_output_token",),
    "itl": ("inter_token_latency",),
}


def _field(metric: str, statistic: str) -> str:
    """The field of a statistic of a metric: ``ttft`` is its mean, ``ttft_p99`` the 99th percentile."""
    return metric if statistic == "mean" else f"{metric}_{statistic}"


def _stated(metric: str, statistic: str) -> Field:
    names = (metric, *_METRIC_NAMES[metric])
    said = [pair for name in names for word in _STATISTICS[statistic] for pair in (f"{word}_{name}", f"{name}_{word}")]
    return Field(DURATION, (*names[1:], *said) if statistic == "mean" else tuple(said))


_FIELDS: dict[str, Field] = {
    "concurrency": Field(
        COUNT, ("clients", "num_concurrency", "max_concurrency", "concurrent_requests", "streams", "users")
    ),
    "rate": Field(COUNT, ("request_rate", "rps", "qps", "rate_per_s", "requests_per_second")),
    "requests": Field(COUNT, ("num_requests", "num_prompts", "request_count", "completed", "completed_turns")),
    "prompt_tokens": FIELDS["prompt_tokens"],
    "output_tokens": FIELDS["output_tokens"],
    **{_field(metric, name): _stated(metric, name) for metric in _METRICS for name in _STATISTICS},
    "name": Field(WORD, ("experiment", "case", "id")),
    "model": Field(WORD, (*FIELDS["model"].names, "model_path")),
    "hardware": Field(WORD, ("gpu", "gpu_type", "gpu_name", "device", "accelerator", "system")),
    "tensor_parallelism": Field(COUNT, ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size")),
    "vllm_version": Field(WORD, ("backend_version", "engine_version")),
}


def tells(sample: Record, given: Columns) -> bool:
    """Whether these columns, some of them given, are those of load levels: a load, lengths and a latency."""
    if {"concurrency", "rate"} & given.keys():
        return True
    known = _columns(sample, given)
    loaded = {"concurrency", "rate"} & known.keys() and {"prompt_tokens", "output_tokens"} <= known.keys()
    timed = any(metric in known or f"{metric}_p50" in known for metric in _METRICS)
    return bool(loaded) and timed and "arrival" not in recognised(sample, given)


def _columns(record: Record, given: Columns) -> dict[str, Column]:
    return {**recognised(record, given, _FIELDS), **given}


def several_levels(file: RecordedFile, what: str) -> RecordingError:
    """The error for a file of several load levels where none is chosen."""
    remedy = f"name the file, `blis-replay ingest .../{file.name}`, which stores them one by one"
    return RecordingError(file.path, "", f"{what}, each of which is an experiment of its own", remedy)


@dataclass(frozen=True)
class _Level:
    """A row: its place in the file, its values, and the columns of the table by field."""

    place: str
    record: Record
    columns: Mapping[str, Column]

    def value(self, name: str) -> object:
        column = self.columns.get(name)
        value = None if column is None else value_of(self.record, column.name)
        return value.strip() or None if isinstance(value, str) else value

    def number(self, name: str) -> float | None:
        """A positive number, times in us; else None."""
        number = finite(self.value(name))
        if number is None or number <= 0:
            return None
        column = self.columns[name]
        number *= US_OF[column.unit] if column.unit else 1.0
        return number if number < (_LONGEST_US if column.unit else MAX_TOKENS) else None

    def word(self, name: str) -> str | None:
        value = self.value(name)
        return text(str(value)) if isinstance(value, str | int) else None


def recognises(head: bytes) -> bool:
    """Whether the names of the columns, or of a first object's keys, say that each row is a load level."""
    return tells(first_record(head), {})


def names_of_levels(file: RecordedFile) -> list[str]:
    """The name of each row, ``""`` of all where not all have one of their own.

    Raises :class:`RecordingError` for no sound table, and for one of more than ``MOST_LEVELS`` rows.
    """
    names = []
    for level in _levels(file):
        names.append(level.word("name") or "")
        if len(names) > MOST_LEVELS:
            raise RecordingError(file.path, "", f"more than {MOST_LEVELS:,} load levels", "split the file")
    if not names:
        raise RecordingError(file.path, "", "no row that is a load level", "copy the file again")
    usable = all(name and printable(name) == name and "/" not in name for name in names)
    return names if usable and len(set(names)) == len(names) else [""] * len(names)


def read_load_level(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """The aggregates of one row, ``file.point``.

    Raises :class:`RecordingError` for a table of several rows where none is chosen, and for a row that says neither
    clients nor rate, no lengths or no latency.
    """
    level = _chosen(file)
    file.tally.records = 1
    clients, rate, sent = (level.number(name) for name in ("concurrency", "rate", "requests"))
    if clients is None and rate is None:
        raise RecordingError(
            file.path, level.place, "neither clients nor a rate", "give it a column `concurrency` or `rate` (a second)"
        )
    requests = sent or (REQUESTS_AT_A_RATE if clients is None else round(clients) * REQUESTS_PER_CLIENT)
    figures = dict(_figures(file, level))
    figures |= {("requests", "sent"): requests, ("requests", "succeeded"): requests}
    lacks = [f"requests: a row of {file.name} has means and percentiles of a whole load level only"]
    if sent is None:
        lacks.append(f"number of requests: {file.name} does not say it, {requests:,} are assumed")
    interval = tokens(_argument(level.record.get("stream_interval"))) or 1
    if derived := _whole_mean(figures, interval):
        figures["e2e", "mean"] = derived
        lacks.append(f"mean E2E: {file.name} does not have it; TTFT and the gaps of the mean output are taken for it")
    unread = [name for name in level.record if name not in {c.name for c in level.columns.values()} | set(ARGUMENTS)]
    if unread:
        lacks.append(f"columns of {file.name} that were not read: {listed(unread)}")
    if clients is not None:
        figures["concurrency", "asked"] = clients
    rows = [(stage, *key, value) for key, value in figures.items() for stage in (0, WHOLE_RUN)]
    stages = () if clients or rate is None else (Stage(0, rate, round(requests / rate * US_PER_S)),)
    return no_requests("table of load levels", aggregate_frame(rows), *lacks, stages=stages)


def server_of_level(file: RecordedFile) -> ServerFacts:
    """What the row says of its server: model, GPU, parallelism, and columns called like an engine argument."""
    level = _chosen(RecordedFile(file.path, file.name, columns=file.columns, point=file.point))
    said = {name: value for name in ARGUMENTS if (value := _argument(level.record.get(name))) is not None}
    if version := level.word("vllm_version"):
        said["vllm_version"] = version.removeprefix("v")
    return ServerFacts(
        name=file.name,
        model=level.word("model"),
        hardware=level.word("hardware"),
        tensor_parallelism=tokens(level.value("tensor_parallelism")),
        engine=said,
    )


def _argument(value: object) -> object:
    """A value as YAML would have it; of CSV all are texts."""
    if not isinstance(value, str):
        return None if isinstance(value, list | Mapping) else value
    word = value.strip()
    number = finite(word)
    if number is not None:
        return int(number) if number.is_integer() and abs(number) < MAX_TOKENS else number
    return {"true": True, "false": False}.get(word.lower(), word or None)


def _levels(file: RecordedFile) -> Iterator[_Level]:
    given = given_columns(file.columns, {**FIELDS, **_FIELDS})
    columns: dict[str, Column] = {}
    seen: object = None
    with TemporaryDirectory(prefix="blis-replay-") as scratch:
        whole = _one_object(file)
        for place, record in [("the object", whole)] if whole else table_of(file, Path(scratch) / "rows").rows:
            if record.keys() == seen:
                yield _Level(place, record, columns)
                continue
            columns, seen = _columns(record, given), record.keys()
            for name, column in columns.items():
                if name not in _FIELDS:
                    problem = f"{quoted(name)} is not a field of a load level"
                    raise RecordingError(file.path, "", problem, f"its fields are {', '.join(_FIELDS)}")
                if _FIELDS[name].kind in TIMES and not column.unit:
                    say = f"add --columns {name}={column.name}:UNIT with one of {', '.join(UNITS)}"
                    raise RecordingError(file.path, "", f"column {quoted(column.name)} says no unit of time", say)
            yield _Level(place, record, columns)


def _one_object(file: RecordedFile) -> Record | None:
    """A file that is one object over several lines, with the statistics of ``{"ttft_ms": {"p99": 1}}`` as columns.

    They are called ``p99_ttft_ms``; the mean is called like the object.
    """
    head = file.head(1 << 16).lstrip()
    if not head.startswith(b"{") or head.partition(b"\n")[0].rstrip().endswith(b"}"):
        return None
    try:
        document = json.loads(file.content(MOST_BYTES_OF_A_LEVEL))
    except (ValueError, RecursionError):
        return None
    flat: dict[str, object] = {}
    for name, value in document.items() if isinstance(document, dict) else ():
        if isinstance(value, dict):
            flat |= {name if inner == "mean" else f"{inner}_{name}": of for inner, of in value.items()}
        else:
            flat[name] = value
    return flat


def _chosen(file: RecordedFile) -> _Level:
    chosen: _Level | None = None
    for number, level in enumerate(_levels(file), 1):
        if number > 1 and not file.point:
            raise several_levels(file, "a table of several load levels")
        chosen = level
        if number == file.point:
            return chosen
    if chosen is None or file.point > 1:
        raise RecordingError(file.path, "", f"no row {max(file.point, 1)}", "ingest the file anew")
    return chosen


def _figures(file: RecordedFile, level: _Level) -> Iterator[tuple[tuple[str, str], float]]:
    """(metric, statistic) and value of what the row states; times in us."""
    for name, metric in (("prompt_tokens", "prompt_tokens"), ("output_tokens", "output_tokens_reported")):
        if (length := level.number(name)) is None:
            raise RecordingError(file.path, level.place, f"no {name}", f"give it a column `{name}`: the mean length")
        yield (metric, "mean"), length
    timed = False
    for name, metric in _METRICS.items():
        for statistic in _STATISTICS:
            field = _field(name, statistic)
            said, value = level.value(field), level.number(field)
            if value is not None:
                timed = True
                yield (metric, statistic), value
            elif said is not None:
                file.tally.reject(f"{level.place} {field}", f"{quoted_value(said)} is not a positive time")
    if not timed:
        raise RecordingError(file.path, level.place, "no latency", "give it a column `ttft_ms`, `tpot_ms` or `e2e_ms`")


def _whole_mean(figures: Mapping[tuple[str, str], float], interval: int) -> float | None:
    """Mean E2E of a row that has the means of TTFT and of the gaps behind it, and none of its own.

    ``interval``: tokens in an event of the stream, between which an ITL is.
    """
    ttft, itl = figures.get(("ttft", "mean")), figures.get(("itl_reported", "mean"))
    gap = figures.get(("tpot_reported", "mean"), itl and itl / interval)
    if ("e2e", "mean") in figures or ttft is None or gap is None:
        return None
    return ttft + gap * max(figures["output_tokens_reported", "mean"] - 1, 0)


FORMAT = RequestFormat(
    "load-levels",
    recognises,
    read=read_load_level,
    levels=names_of_levels,
    server=server_of_level,
    fields=_FIELDS,
    tells=tells,
)
