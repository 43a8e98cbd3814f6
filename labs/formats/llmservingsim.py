"""Benchmark runs of LLMServingSim: ``requests.jsonl``, a table whose columns are known, and ``meta.json``.

``queued_ts`` and the stamps behind it are of the engine's monotonic clock, ``arrival_time`` is of the epoch.  Its own
latencies count from ``queued_ts``, so that is the arrival here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from blis_replay.ingest.readers.documents import json_mapping, section, text, tokens
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.formats import FileKind, RequestFormat
from blis_replay.ingest.readers.requests import RequestsRead, ServerFacts
from blis_replay.ingest.readers.server.engine_arguments import ARGUMENTS
from blis_replay.ingest.readers.tables.columns import Column
from blis_replay.ingest.readers.tables.requests_table import read_requests as read_table

_COLUMNS = {
    "arrival": Column("queued_ts", "s"),
    "scheduled": Column("scheduled_ts", "s"),
    "first_token": Column("first_token_ts", "s"),
    "end": Column("last_token_ts", "s"),
    "prompt_tokens": Column("input_toks"),
    "output_tokens": Column("output_toks"),
    "request_id": Column("request_id"),
}
# Sections of meta.json with engine arguments, that which knows best first.
_SECTIONS = (
    "kv_cache",
    *(f"resolved_config.{name}_config" for name in ("scheduler", "cache", "parallel", "model")),
    "engine_kwargs",
)
# Here `policy` is the order of requests.
_RENAMED = {"policy": "scheduling_policy", "cache_dtype": "kv_cache_dtype"}


recognises = begins_with(b"{", "input_toks", "queued_ts", in_first_line=True)


def read_requests(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order, on the engine's clock; errors as for a table."""
    read = read_table(file, stamps_path, _COLUMNS)
    remarks = [remark for remark in read.remarks if "arrival_time" not in remark]
    behind = f"the time between arrival_time and queued_ts in {file.name}: their clocks are two, arrivals are queued_ts"
    return replace(
        read, clock_name="server", clock_kind="monotonic", version="LLMServingSim bench", remarks=(*remarks, behind)
    )


recognises_meta = begins_with(b"{", "engine_kwargs", "vllm_version", "dataset_hash")


def read_meta(file: RecordedFile) -> ServerFacts:
    """Model, GPU, parallelism and engine arguments; ``RecordingError`` if it is not a JSON object."""
    document = json_mapping(file)
    engine: dict[str, object] = {}
    for path in _SECTIONS:
        for key, value in section(document, path).items():
            name = _RENAMED.get(key, key)
            if name in ARGUMENTS and value is not None and not isinstance(value, Mapping | list):
                engine.setdefault(name, value)
    if version := text(document.get("vllm_version")):
        engine["vllm_version"] = version
    return ServerFacts(
        name=file.name,
        model=text(document.get("model")),
        tensor_parallelism=tokens(engine.get("tensor_parallel_size")),
        engine=engine,
        hardware=text(section(document, "hardware").get("device_name")),
    )


FORMAT = RequestFormat("llmservingsim", recognises, read=read_requests)
META = FileKind("LLMServingSim meta", recognises_meta, server=read_meta)
