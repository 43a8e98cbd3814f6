"""What a format of request records is: how it is recognised, and how it is read.

Adding a format is one module and one line in :data:`REQUEST_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.readers import arrivals
from blis_replay.ingest.readers.clients import aiperf, guidellm, unplaced, vllm_bench
from blis_replay.ingest.readers.clients import inference_perf as inference_perf_requests
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.readers.tables import load_levels, parquet_requests, requests_table, simulators

HEAD_BYTES = 64 << 10
TABLE, LOAD_LEVELS = "table", "load-levels"


@dataclass(frozen=True)
class RequestFormat:
    """One tool's form of per-request records.

    ``name``: for ``--input-format`` and error messages, lower case.  ``recognises(head)``: whether
    these are the first bytes (decompressed, up to ``HEAD_BYTES``) of such a file; it never
    raises.  ``read(file, stamps_path)``: the requests; stream stamps go to the flat file
    ``stamps_path`` (``RawEvents``), if there are any.  ``latencies``: false for traces that
    say when requests came and how long they were, and nothing else.  ``sums_up``: the format
    whose requests such a file sums up; it has none of its own.
    """

    name: str
    recognises: Callable[[bytes], bool]
    read: Callable[[RecordedFile, Path], RequestsRead]
    latencies: bool = True
    sums_up: str = ""


def _read_parquet(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """Our own export, or any table."""
    if parquet_requests.is_export(file.path):
        return parquet_requests.read_requests(file)
    return requests_table.read_requests(file, stamps_path)


# The order is that of trust: where a recording has requests of several formats, the first are used.
REQUEST_FORMATS: tuple[RequestFormat, ...] = (
    RequestFormat("inference-perf", inference_perf_requests.recognises, inference_perf_requests.read_requests),
    RequestFormat("guidellm", guidellm.recognises, guidellm.read_requests),
    RequestFormat("vllm-bench", vllm_bench.recognises, vllm_bench.read_requests),
    RequestFormat("sglang-bench", vllm_bench.recognises_sglang, vllm_bench.read_sglang),
    RequestFormat("aiperf", aiperf.recognises, aiperf.read_requests),
    RequestFormat("tracev2", simulators.recognises_tracev2, simulators.read_tracev2),
    RequestFormat("parquet", parquet_requests.recognises, _read_parquet),
    RequestFormat("llmservingsim", simulators.recognises_llmservingsim, simulators.read_llmservingsim),
    RequestFormat("mooncake", arrivals.recognises_mooncake, arrivals.read_mooncake, latencies=False),
    RequestFormat("azure-llm", arrivals.recognises_azure_llm, arrivals.read_azure_llm, latencies=False),
    RequestFormat("burstgpt", arrivals.recognises_burstgpt, arrivals.read_burstgpt, latencies=False),
    RequestFormat("legacy-blis-csv", simulators.recognises_legacy_csv, simulators.read_legacy_csv, latencies=False),
    RequestFormat("llmperf", unplaced.recognises_llmperf, unplaced.read_llmperf),
    RequestFormat("genai-bench", unplaced.recognises_genai_bench, unplaced.read_genai_bench),
    RequestFormat("aiperf-summary", aiperf.recognises_summary, aiperf.read_summary, sums_up="aiperf"),
    RequestFormat("guidellm-csv", unplaced.recognises_guidellm_table, unplaced.read_guidellm_table),
    RequestFormat(LOAD_LEVELS, load_levels.recognises, load_levels.read_load_level),
    # The last: what names its columns like a table of requests may be a file of a tool all the same.
    RequestFormat(TABLE, requests_table.recognises, requests_table.read_requests),
)
