"""The kinds of files that a recording can have: how each is known, and how request records are read.

A new format of request records is one module and one entry of :data:`REQUEST_FORMATS`.  Another distribution plugs a
:class:`RequestFormat` in as the add-on ``format.NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blis_replay.compiled.addons import addons
from blis_replay.ingest.readers import arrivals, step_log
from blis_replay.ingest.readers.clients import aiperf, guidellm, inference_perf, unplaced, vllm_bench
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import framing as otlp_framing
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.readers.server import iterations, kv_events, metrics
from blis_replay.ingest.readers.server import log as server_log
from blis_replay.ingest.readers.tables import load_levels, parquet_requests, requests_table, simulators
from blis_replay.ingest.readers.tables.simulators import TraceHeader

TABLE, LOAD_LEVELS = "table", "load-levels"
EXPERIMENT, PROFILE, RESOLVED = "experiment configuration", "load profile", "inference-perf configuration"
SUMMARY, STAGE, TRACE_HEADER = "inference-perf summary", "inference-perf stage", "TraceV2 header"
OTLP, KV_EVENTS, STEP_LOG, METRICS = "otlp", "kv-events", "step-log", "metrics"
FORWARD_PASSES, SERVER_LOG, LLMSERVINGSIM_META = "forward-passes", "server log", "LLMServingSim meta"


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    ``recognises(head)``: whether these are the first bytes (decompressed, up to ``HEAD_BYTES``) of such a file; it
    never raises; None: it is known by its name alone.  ``usual``: a pattern of its path inside the recording, without
    ``.gz`` or ``.zst``.  Where damage hides the content the name says what it was, and its records are counted as lost.
    ``several``: a recording can have more than one.
    """

    name: str
    recognises: Callable[[bytes], bool] | None = None
    usual: str = ""
    several: bool = False

    def is_called(self, path: str) -> re.Match[str] | None:
        """The match of a path inside the recording with the usual name."""
        return re.fullmatch(rf"(?:{self.usual})(?:\.gz|\.zst)?", path, re.ASCII) if self.usual else None


@dataclass(frozen=True)
class RequestFormat(FileKind):
    """One tool's form of per-request records; ``name`` is in lower case, for ``--input-format``.

    ``read(file, stamps_path)``: the requests; stream stamps go to the flat file ``stamps_path`` (``RawEvents``), if
    there are any.  ``latencies``: false for traces that say when requests came and how long they were, and nothing
    else.  ``sums_up``: the format whose requests such a file sums up; it has none of its own.  ``levels``: of a file
    with a load level a row, the name of each, ``""`` without one; each is a recording (``file.point``).  ``server``:
    what the file says of the server.
    """

    read: Callable[[RecordedFile, Path], RequestsRead] = requests_table.read_requests
    latencies: bool = True
    sums_up: str = ""
    levels: Callable[[RecordedFile], list[str]] | None = None
    server: Callable[[RecordedFile], TraceHeader] | None = None


def _read_parquet(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """Our own export, or any table."""
    if parquet_requests.is_export(file.path):
        return parquet_requests.read_requests(file)
    return requests_table.read_requests(file, stamps_path)


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
    RequestFormat("sglang-bench", vllm_bench.recognises_sglang, read=vllm_bench.read_sglang),
    RequestFormat("aiperf", aiperf.recognises, read=aiperf.read_requests),
    RequestFormat("tracev2", simulators.recognises_tracev2, r"trace\.csv", read=simulators.read_tracev2),
    RequestFormat("parquet", parquet_requests.recognises, read=_read_parquet),
    RequestFormat("llmservingsim", simulators.recognises_llmservingsim, read=simulators.read_llmservingsim),
    RequestFormat("mooncake", arrivals.recognises_mooncake, read=arrivals.read_mooncake, latencies=False),
    RequestFormat("azure-llm", arrivals.recognises_azure_llm, read=arrivals.read_azure_llm, latencies=False),
    RequestFormat("burstgpt", arrivals.recognises_burstgpt, read=arrivals.read_burstgpt, latencies=False),
    RequestFormat(
        "legacy-blis-csv", simulators.recognises_legacy_csv, read=simulators.read_legacy_csv, latencies=False
    ),
    RequestFormat("llmperf", unplaced.recognises_llmperf, read=unplaced.read_llmperf),
    RequestFormat("genai-bench", unplaced.recognises_genai_bench, read=unplaced.read_genai_bench),
    RequestFormat("aiperf-summary", aiperf.recognises_summary, read=aiperf.read_summary, sums_up="aiperf"),
    RequestFormat(
        "guidellm-csv",
        unplaced.recognises_guidellm_table,
        read=unplaced.read_guidellm_table,
        levels=unplaced.names_of_points,
    ),
    RequestFormat(
        LOAD_LEVELS,
        load_levels.recognises,
        read=load_levels.read_load_level,
        levels=load_levels.names_of_levels,
        server=load_levels.server_of_level,
    ),
    # The last: what names its columns like a table of requests may be a file of a tool all the same.
    RequestFormat(TABLE, requests_table.recognises),
)

# Small files that say how the experiment was set up, known by their names.
_CONFIGURATIONS = (
    FileKind(EXPERIMENT, usual=r"exp-config\.ya?ml"),
    FileKind(PROFILE, usual=r"profile\.ya?ml"),
    FileKind(RESOLVED, usual=rf"(?:(?:results|reports)/){_PREFIX}config\.ya?ml|config\.ya?ml"),
    FileKind(SUMMARY, usual=rf"{_RESULTS}{_PREFIX}summary_lifecycle_metrics\.json"),
    FileKind(STAGE, usual=rf"{_RESULTS}{_PREFIX}stage_(\d{{1,6}})_lifecycle_metrics\.json", several=True),
    FileKind(TRACE_HEADER, usual=r"trace\.ya?ml"),
)
_OTLP = FileKind(OTLP, otlp_framing.recognises, r"traces(?:-[\w.:+-]+)?\.jsonl?", several=True)
# Files of the server, in the order in which their content is looked at.
_SERVER = (
    FileKind(KV_EVENTS, kv_events.recognises, r"kv_events(?:[-_.][\w.:+-]+)?\.jsonl(?:\.\d{1,6})?", several=True),
    FileKind(STEP_LOG, step_log.recognises, r"steps-engine\d{1,6}-\d{1,12}-\d{1,20}\.jsonl", several=True),
    FileKind(FORWARD_PASSES, iterations.recognises_forward_passes, several=True),
    FileKind(LLMSERVINGSIM_META, simulators.recognises_meta),
    FileKind(METRICS, metrics.recognises, several=True),
    FileKind(SERVER_LOG, server_log.recognises, r"vllm\.log(?:\.\d{1,6})?", several=True),
)


@cache
def request_formats() -> tuple[RequestFormat, ...]:
    """All formats of request records in the order of trust, those of add-ons before tables of one's own."""
    plugged = tuple(point.load() for point in addons("format").values())
    return (*REQUEST_FORMATS[:-1], *plugged, REQUEST_FORMATS[-1])


@cache
def file_kinds() -> dict[str, FileKind]:
    """All kinds of files by name, in the order in which a file is asked for them."""
    return {kind.name: kind for kind in (*_CONFIGURATIONS, _OTLP, *request_formats(), *_SERVER)}


@cache
def input_formats() -> tuple[str, ...]:
    """What ``--input-format`` takes."""
    return (OTLP, KV_EVENTS, STEP_LOG, METRICS, FORWARD_PASSES, *(form.name for form in request_formats()))
