"""TraceV2, the request trace of BLIS: ``trace.yaml``, ``trace.csv``, and ``trace.itl.csv`` with the stream's stamps.

Columns are read by name, so both generations of the header (with and without the newer columns) are one.  Stamps of a
real run are Unix epoch microseconds; those of a generated or replayed one count from its start, and such a row without
chunk stamps is a request that nobody has served yet.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.documents import WHOLE_RUN, quoted, section, text, tokens, whole
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import named_rows
from blis_replay.ingest.readers.requests import (
    EARLIEST_EPOCH_US,
    Request,
    RequestsRead,
    Row,
    ServerFacts,
    UnusableError,
    clock_kind_of,
    gathered,
    prefixes_of_groups,
    request_row,
)
from blis_replay.ingest.recording import TokenEvents

_ENGINE_KEYS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "dtype")
_REQUIRED = ("input_tokens", "output_tokens", "send_time_us", "first_chunk_time_us", "last_chunk_time_us", "status")
_STATUS = {"ok": "ok", "error": "error", "timeout": "timeout", "incomplete": "aborted"}


def read_header(file: RecordedFile) -> ServerFacts:
    """The header; :class:`RecordingError` if it is not a YAML mapping or its time unit is not microseconds."""
    document = documents.yaml_mapping(file)
    unit = document.get("time_unit", "us")
    if unit not in ("us", "microseconds"):
        raise RecordingError(
            file.path, "field time_unit", f"{quoted(unit)} is not a unit of TraceV2", "give the times in us"
        )
    server = section(document, "server")
    return ServerFacts(
        model=text(server.get("model")),
        tensor_parallelism=tokens(server.get("tensor_parallel")),
        engine={key: server[key] for key in _ENGINE_KEYS if server.get(key) is not None},
    )


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a TraceV2 table."""
    header = head.partition(b"\n")[0]
    return all(name.encode() in header for name in ("send_time_us", "first_chunk_time_us", "last_chunk_time_us"))


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests of ``trace.csv`` in file order; the table has no stream stamps.

    The E2E of a failed request is the time for which the client held on.  Raises :class:`RecordingError` if a needed
    column is missing; rows that cannot be used are rejected and counted by line.
    """
    reading = _Reading()
    rows, _events = gathered(file, named_rows(file, _REQUIRED, "write it as TraceV2"), reading.request)
    prefix, remarks = prefixes_of_groups(reading.groups, "prefix_group and prefix_length of TraceV2")
    delays = documents.aggregate_frame(_delays(reading.scheduled, reading.sent))
    kind = clock_kind_of(rows)
    return RequestsRead(rows, "client", kind, reading.model, aggregates=delays, prefix=prefix, remarks=remarks)


_ON_TIME_US = 1_000  # a client that sends within a millisecond of its schedule has none worth a word


def _delays(scheduled_us: Sequence[int], sent_us: Sequence[int]) -> Iterator[tuple[int, str, str, float]]:
    """How far sends are behind their schedule, us, as aggregates of the run; the first in the schedule is on time."""
    if not scheduled_us:
        return
    behind = np.array(sent_us) - np.array(scheduled_us)
    behind -= behind[int(np.argmin(scheduled_us))]
    if np.abs(behind).max() > _ON_TIME_US:
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            yield WHOLE_RUN, "schedule_delay", name, float(np.quantile(behind, share))


_CHUNK_SCHEMA = {"request_id": pl.String, "chunk_index": pl.Int64, "timestamp_us": pl.Int64}
MAX_CHUNK_BYTES = 1 << 30  # some 25 million stamps


def recognises_chunks(head: bytes) -> bool:
    """Whether a file that begins like this has the stream stamps of a TraceV2 table."""
    return head.startswith(",".join(_CHUNK_SCHEMA).encode())


def with_chunks(read: RequestsRead, file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests with the stamps of their tokens, which go to the flat file ``stamps_path``.

    The events of a chat's role and of the server's usage are left out.  A row that cannot be used, or belongs to no
    request, is rejected.  Stamps of only some requests are not used: gaps of a part would be compared with those of
    all.
    """
    try:
        content = io.BytesIO(file.content(MAX_CHUNK_BYTES))
        chunks = pl.read_csv(content, schema=_CHUNK_SCHEMA, ignore_errors=True, truncate_ragged_lines=True)
    except pl.exceptions.PolarsError as error:
        problem = str(error).splitlines()[0][:120]
        raise RecordingError(file.path, "", f"not a table of chunks ({problem})", "copy the file again") from error
    requests = read.rows.frame(["request_id", "output_tokens_reported", "status"]).with_row_index("row")
    events = pl.len().over("row") - pl.col("output_tokens_reported")
    stamps = (
        chunks.drop_nulls()
        .join(requests, on="request_id")
        .sort("row", "chunk_index")
        .with_columns(place=pl.int_range(pl.len()).over("row"), last=pl.len().over("row") - 1, extra=events)
    )
    of_role = (pl.col("place") == 0) & (pl.col("extra") == _WITH_ROLE_AND_USAGE)
    of_usage = (pl.col("place") == pl.col("last")) & pl.col("extra").is_in([_WITH_USAGE, _WITH_ROLE_AND_USAGE])
    tokens_of = stamps.filter(~(of_role | of_usage).fill_null(False))
    tokens_of["timestamp_us"].to_numpy().tofile(stamps_path)
    counts = np.bincount(tokens_of["row"].to_numpy(), minlength=requests.height).astype(np.int64)
    file.tally.records = stamps.height
    if unusable := chunks.height - stamps.height:
        file.tally.reject("whole file", f"{unusable:,} chunks without a stamp, or of no request of the table")
    without = int(((requests["status"] == "ok").to_numpy() & (counts == 0)).sum())
    if without:
        remark = f"token times of {without:,} of {requests.height:,} requests: those in {file.name} are not used either"
        return replace(read, remarks=(*read.remarks, remark))
    return replace(read, events=TokenEvents(stamps_path, np.cumsum(counts) - counts, counts))


# Events of a stream beyond its tokens.
_WITH_USAGE, _WITH_ROLE_AND_USAGE = 1, 2


@dataclass
class _Reading:
    """What is gathered beside the rows; ``seen``: of each name the hash of its row; ``scheduled``, ``sent``: us."""

    seen: dict[str, int] = field(default_factory=dict)
    groups: list[tuple[str, int | None]] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    model: str | None = None

    def request(self, values: dict[str, str]) -> Request:
        """The row of a line; :class:`UnusableError` if it has none."""
        name, content = values.get("request_id", ""), hash(tuple(values.values()))
        if name and name in self.seen:
            again = "identical" if self.seen[name] == content else "with other values"
            raise UnusableError(f"request {name[:60]} again, {again}")
        row = _row(values)
        self.seen[name] = content
        self.model = self.model or text(values.get("model"))
        if (scheduled_us := whole(values.get("arrival_time_us"))) is not None:
            self.scheduled.append(scheduled_us)
            self.sent.append(int(values["send_time_us"]))
        self.groups.append((values.get("prefix_group", ""), tokens(values.get("prefix_length"))))
        return row, ()


def _row(values: dict[str, str]) -> Row:
    status = _STATUS.get(values["status"])
    sent_us, first_us, last_us = (whole(values[f"{event}_time_us"]) for event in ("send", "first_chunk", "last_chunk"))
    if status is None:
        raise UnusableError(f"status {values['status'][:40]!r} is not one of {', '.join(_STATUS)}")
    if sent_us is None or first_us is None or last_us is None:
        raise UnusableError("a time that is not a whole number of microseconds")
    ok = status == "ok"
    served = first_us > 0 or last_us > 0 or sent_us >= EARLIEST_EPOCH_US
    if last_us < sent_us and ok and served:
        raise UnusableError(f"the last chunk comes {sent_us - last_us} us before the send")
    if ok and first_us and not sent_us <= first_us <= last_us:
        raise UnusableError("the first chunk does not lie between the send and the last chunk")
    output_tokens, events = whole(values["output_tokens"]), whole(values.get("num_chunks"))
    # An event beyond the tokens, and that of the role, carries the usage: then the length is the server's.
    beyond = None if output_tokens is None or events is None else events - output_tokens
    incomplete = "not finished at the horizon" if values["status"] == "incomplete" else None
    return request_row(
        sent_us,
        status,
        text(values.get("error_message")) or incomplete,
        request_id=text(values.get("request_id")),
        prompt_tokens=tokens(values.get("server_input_tokens")) or _requested_tokens(values),
        output_tokens_reported=output_tokens,
        usage_output_tokens=output_tokens if beyond in (_WITH_USAGE, _WITH_ROLE_AND_USAGE) else None,
        ttft_us=first_us - sent_us if ok and first_us else None,
        e2e_us=last_us - sent_us if last_us else None,
    )


def _requested_tokens(values: dict[str, str]) -> int | None:
    """The requested prompt length: a row's own tokens, and those that it shares with its group before them."""
    own = whole(values["input_tokens"])
    shared = whole(values.get("prefix_length")) if values.get("prefix_group") else 0
    return tokens(own + (shared or 0)) if own is not None else None
