"""The kinds of files that a recording can have: how each is known, and how request records are read.

A new format of request records is one module and one entry of :data:`REQUEST_FORMATS`.  Another distribution plugs a
:class:`RequestFormat`, or another :class:`FileKind`, in as the add-on ``format.NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from blis_replay.base.addons import addons, loaded
from blis_replay.ingest.readers import step_log
from blis_replay.ingest.readers.clients import aiperf, guidellm, inference_perf, vllm_bench
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import framing as otlp_framing
from blis_replay.ingest.readers.requests import RequestsRead, ServerFacts
from blis_replay.ingest.readers.server import log as server_log
from blis_replay.ingest.readers.server import metrics
from blis_replay.ingest.readers.tables import columns, requests_table, tracev2
from blis_replay.ingest.readers.tables.columns import Column, Columns, Field
from blis_replay.ingest.readers.tables.records import PARQUET_MAGIC

TABLE = "table"
EXPERIMENT, PROFILE, RESOLVED = "experiment configuration", "load profile", "inference-perf configuration"
SUMMARY, STAGE = "inference-perf summary", "inference-perf stage"
TRACE_HEADER, CHUNKS = "TraceV2 header", "TraceV2 chunks"
OTLP, STEP_LOG, METRICS = "otlp", "step-log", "metrics"
SERVER_LOG = "server log"


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    ``recognises(head)``: whether a file begins like this (decompressed, up to ``HEAD_BYTES``); it never raises; None:
    known by its name alone.  ``usual``: a pattern of its path inside the recording, without ``.gz`` or ``.zst``, which
    also tells a damaged file.  ``several``: a recording can have more than one.  ``server``: what the file says of the
    server.
    """

    name: str
    recognises: Callable[[bytes], bool] | None = None
    usual: str = ""
    several: bool = False
    server: Callable[[RecordedFile], ServerFacts] | None = None

    def is_called(self, path: str) -> re.Match[str] | None:
        """The match of a path inside the recording with the usual name."""
        return re.fullmatch(rf"(?:{self.usual})(?:\.gz|\.zst)?", path, re.ASCII) if self.usual else None


@dataclass(frozen=True)
class RequestFormat(FileKind):
    """One tool's form of per-request records; ``name`` is in lower case, for ``--input-format``.

    ``read(file, stamps_path)``: the requests; stream stamps go to the flat file ``stamps_path``.  ``latencies``: false
    for traces of arrivals and lengths.  ``sums_up``: the format whose requests such a file sums up.  ``levels``: the
    names of the load levels of a table of these; each is a recording (``file.point``).  ``with_stamps(requests, file,
    stamps_path)`` adds the stream stamps of a file of kind ``stamps``.  ``fields``: what ``--columns`` can say of a
    table; ``tells(first row, given)``: whether a table with such columns is of this format.
    """

    read: Callable[[RecordedFile, Path], RequestsRead] = requests_table.read_requests
    latencies: bool = True
    sums_up: str = ""
    levels: Callable[[RecordedFile], list[str]] | None = None
    stamps: str = ""
    with_stamps: Callable[[RequestsRead, RecordedFile, Path], RequestsRead] | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    tells: Callable[[Mapping[str, object], Columns], bool] | None = None


# A load generator may put a prefix of the user's before the names of its reports.
_RESULTS, _PREFIX = r"(?:(?:results|reports)/)?", r"(?:\S*?[-_.])?"
# The order is that of trust: where a recording has requests of several formats, the first are used.
REQUEST_FORMATS: tuple[RequestFormat, ...] = (
    RequestFormat(
        "inference-perf",
        inference_perf.recognises,
        rf"{_RESULTS}{_PREFIX}per_request_lifecycle_metrics\.json",
        read=inference_perf.read_requests,
    ),
    RequestFormat("guidellm", guidellm.recognises, read=guidellm.read_requests),
    RequestFormat("vllm-bench", vllm_bench.recognises, read=vllm_bench.read_requests),
    RequestFormat(
        "sglang-bench", vllm_bench.recognises_sglang, server=vllm_bench.sglang_server, read=vllm_bench.read_sglang
    ),
    RequestFormat("aiperf", aiperf.recognises, read=aiperf.read_requests),
    RequestFormat(
        *("tracev2", tracev2.recognises, r"trace\.csv"),
        read=tracev2.read_requests,
        stamps=CHUNKS,
        with_stamps=tracev2.with_chunks,
    ),
    RequestFormat("parquet", lambda head: head.startswith(PARQUET_MAGIC)),
    RequestFormat("aiperf-summary", aiperf.recognises_summary, read=aiperf.read_summary, sums_up="aiperf"),
    # The last, as a tool's own file may name its columns like this.
    RequestFormat(TABLE, requests_table.recognises, fields=columns.FIELDS, tells=columns.tells),
)

# Formats of add-ons come before these: summaries without requests, and tables of any columns.
_OWN_SUMMARIES = [form.name for form in REQUEST_FORMATS].index("aiperf-summary")
# Further formats of our labs, which plug them in.
LABS_FORMATS = (
    *("azure-llm", "genai-bench", "guidellm-csv"),
    *("llmservingsim", "load-levels", "mooncake"),
)

# Small files that say how the experiment was set up, known by their names.
_CONFIGURATIONS = (
    FileKind(EXPERIMENT, usual=r"exp-config\.ya?ml"),
    FileKind(PROFILE, usual=r"profile\.ya?ml"),
    FileKind(RESOLVED, usual=rf"(?:(?:results|reports)/){_PREFIX}config\.ya?ml|config\.ya?ml"),
    FileKind(SUMMARY, usual=rf"{_RESULTS}{_PREFIX}summary_lifecycle_metrics\.json"),
    FileKind(STAGE, usual=rf"{_RESULTS}{_PREFIX}stage_(\d{{1,6}})_lifecycle_metrics\.json", several=True),
    FileKind(TRACE_HEADER, usual=r"trace\.ya?ml", server=tracev2.read_header),
)
_CHUNKS = FileKind(CHUNKS, tracev2.recognises_chunks, r"trace\.itl\.csv")
_OTLP = FileKind(OTLP, otlp_framing.recognises, r"traces(?:-[\w.:+-]+)?\.(?:jsonl?|pb)", several=True)
# Files of the server, in the order in which their content is looked at.
_SERVER = (
    FileKind(STEP_LOG, step_log.recognises, r"steps-engine\d{1,6}-\d{1,12}-\d{1,20}\.jsonl", several=True),
    FileKind(METRICS, metrics.recognises, several=True),
    FileKind(SERVER_LOG, server_log.recognises, r"vllm\.log(?:\.\d{1,6})?", several=True),
)


@cache
def _plugged_in() -> tuple[FileKind, ...]:
    """The kinds of files of installed add-ons, by name."""
    return tuple(loaded(point) for point in addons("format").values())


@cache
def request_formats() -> tuple[RequestFormat, ...]:
    """All formats of request records in the order of trust, those of add-ons before the user's own tables."""
    plugged = (kind for kind in _plugged_in() if isinstance(kind, RequestFormat))
    return (*REQUEST_FORMATS[:_OWN_SUMMARIES], *plugged, *REQUEST_FORMATS[_OWN_SUMMARIES:])


def given_columns(said: str) -> dict[str, Column]:
    """What ``--columns`` says, by field of a table of any format; :class:`RecordingError` if not of its form."""
    fields = {name: field for form in reversed(request_formats()) for name, field in form.fields.items()}
    return columns.given_columns(said, fields)


@cache
def file_kinds() -> dict[str, FileKind]:
    """All kinds of files by name, in the order in which a file is asked for them."""
    others = (kind for kind in _plugged_in() if not isinstance(kind, RequestFormat))
    return {kind.name: kind for kind in (*_CONFIGURATIONS, _CHUNKS, _OTLP, *request_formats(), *others, *_SERVER)}


@cache
def input_formats() -> tuple[str, ...]:
    """What ``--input-format`` takes."""
    return (
        OTLP,
        STEP_LOG,
        METRICS,
        *(form.name for form in request_formats() if form.recognises),
    )


def labs_formats() -> tuple[str, ...]:
    """The formats of our labs that are not installed here."""
    return tuple(name for name in LABS_FORMATS if name not in input_formats())
