"""vLLM's server log: version, engine arguments, KV cache size, prefix-cache hit rate.

Messages are matched, not their prefixes, which logging configurations change.  A log can
hold several starts of the server; the last one served the requests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from blis_replay.ingest.readers.documents import text
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.server.iterations import IterationLines, begins_with_iterations

MAX_LINE_BYTES = 1 << 20
MAX_ARGUMENTS_CHARS = 64 << 10

_VERSION = re.compile(r"vLLM API server version (\S{1,60})|Initializing a V\d LLM engine \(v([^)]{1,60})\)")
# To the end of the line: a search for the closing brace from each of many openings would take their square.
_ARGUMENTS = re.compile(r"non-default args: (\{.*)")
_CONFIG = re.compile(r"with config: (.*)")
_KV_TOKENS = re.compile(r"GPU KV cache size: ([\d,]{1,20}) tokens")
_KV_BLOCKS = re.compile(r"num_gpu_blocks is: (\d{1,12})\b")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,12})")
_HIT_RATE = re.compile(r"Prefix cache hit rate: (\d{1,3}(?:\.\d+)?)%")

# Engine configuration line -> engine argument; chunked prefill is named one way in 0.11 and another in 0.15.
_CONFIG_FIELDS = {
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "enable_prefix_caching": "enable_prefix_caching",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "enable_chunked_prefill": "enable_chunked_prefill",
}
_KEPT_ARGUMENTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "async_scheduling",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduling_policy",
    "tensor_parallel_size",
)
# The data type served: a quantization, else the type of the weights.
_QUANTIZATION, _DTYPE = (re.compile(rf"\b{name}=(?:torch\.)?(\w{{1,40}})") for name in ("quantization", "dtype"))


@dataclass
class ServerLog:
    """What the last start in the log says; ``engine`` by vLLM's argument names.

    ``prefix_hit_rate``: that of the last throughput line, 0..1; it is over a sliding window of
    recent queries and not per request.
    """

    version: str | None = None
    model: str | None = None
    engine: dict[str, object] = field(default_factory=dict)
    kv_tokens: int | None = None
    prefix_hit_rate: float | None = None
    starts: int = 0

    def num_gpu_blocks(self, block_size: int) -> int | None:
        """KV blocks including the reserved one: as logged, else KV tokens over the block size."""
        logged = self.engine.get("num_gpu_blocks")
        if isinstance(logged, int):
            return logged
        return self.kv_tokens // block_size if self.kv_tokens is not None else None


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is the log of a vLLM server."""
    text = head.decode("utf-8", "replace")
    return begins_with_iterations(text) or any(
        pattern.search(text) for pattern in (_VERSION, _ARGUMENTS, _KV_TOKENS, _HIT_RATE)
    )


def read_server_log(
    file: RecordedFile, iterations: IterationLines | None = None, log: ServerLog | None = None
) -> ServerLog:
    """What the log says about the server; fields stay ``None`` where it says nothing.

    An argument literal that cannot be read is rejected and counted; every other line that
    matches nothing is no record.  ``iterations``: takes the lines that tell what a step computed; ``log``: what
    earlier parts of a rotated log said.
    """
    log = log or ServerLog()
    for number, raw in lines(file, MAX_LINE_BYTES):
        if iterations is not None and iterations.take(file, number, raw):
            continue
        line = raw.decode("utf-8", "replace")
        if _read_line(file, log, f"line {number}", line):
            file.tally.records += 1
    return log


def _read_line(file: RecordedFile, log: ServerLog, place: str, line: str) -> bool:
    if match := _HIT_RATE.search(line):
        log.prefix_hit_rate = min(1.0, float(match[1]) / 100)
    elif match := _ARGUMENTS.search(line):
        _start(log, _literal(file, place, match[1].rpartition("}")[0] + "}"))
    elif match := _VERSION.search(line):
        log.version = text(match[1] or match[2])
        if config := _CONFIG.search(line):
            _read_config(log, config[1])
    elif match := _KV_TOKENS.search(line):
        log.kv_tokens = int(match[1].replace(",", "") or 0) or None
    elif match := _KV_BLOCKS.search(line):
        log.engine["num_gpu_blocks"] = int(match[1])
    elif match := _CHUNKED.search(line):
        log.engine.update(enable_chunked_prefill=True, max_num_batched_tokens=int(match[1]))
    elif match := _ASYNC.search(line):
        log.engine["async_scheduling"] = match[1] == "enabled"
    else:
        return False
    return True


def _start(log: ServerLog, arguments: Mapping[str, object]) -> None:
    """A server start: what an earlier start said no longer holds."""
    log.starts += 1
    log.kv_tokens = log.prefix_hit_rate = None
    log.engine = {key: arguments[key] for key in _KEPT_ARGUMENTS if arguments.get(key) is not None}
    for named in (arguments.get("quantization"), arguments.get("dtype")):
        if named not in (None, "auto"):
            log.engine.setdefault("dtype", named)
    served = arguments.get("served_model_name")
    log.model = text(served[0] if isinstance(served, list) and served else served) or text(arguments.get("model"))


def _literal(file: RecordedFile, place: str, literal: str) -> Mapping[str, object]:
    """The Python dict that vLLM prints, read as a literal (never evaluated)."""
    if len(literal) > MAX_ARGUMENTS_CHARS:
        file.tally.reject(place, f"engine arguments of more than {MAX_ARGUMENTS_CHARS} characters")
        return {}
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        file.tally.reject(place, "the engine arguments are no Python literal")
        return {}
    if not isinstance(value, dict):
        file.tally.reject(place, "the engine arguments are no mapping")
        return {}
    return {str(key): entry for key, entry in value.items() if isinstance(key, str)}


def _read_config(log: ServerLog, config: str) -> None:
    for name, argument in _CONFIG_FIELDS.items():
        if match := re.search(rf"\b{name}=(\d{{1,12}}|True|False)\b", config):
            value: object = match[1] == "True" if match[1] in ("True", "False") else int(match[1])
            log.engine.setdefault(argument, value)
    for pattern in (_QUANTIZATION, _DTYPE):
        if (match := pattern.search(config)) and match[1] != "None":
            log.engine.setdefault("dtype", match[1])
    if log.model is None and (match := re.search(r"\bmodel='([^']{1,500})'", config)):
        log.model = text(match[1])
