"""vLLM's server log: version, engine arguments given and resolved, KV cache size, prefix-cache hit rate.

Messages are matched, not their prefixes, which logging configurations change.  A log can
hold several starts of the server; the last one served the requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from blis_replay.ingest.readers.documents import text
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.server.engine_arguments import ARGUMENTS, argument_named
from blis_replay.ingest.readers.server.iterations import IterationLines, begins_with_iterations
from blis_replay.ingest.readers.server.python_repr import Text, read_fields, read_mapping
from blis_replay.ingest.readers.server.throughput import ThroughputLines

MAX_LINE_BYTES = 1 << 20
MAX_ARGUMENTS_CHARS = 256 << 10

_ARGUMENTS = "non-default args: "
# How vLLM begins a line, and how many lines a terminal may have made of one.
_BEGINS_A_LINE = re.compile(rb"\s*(?:\(\w+ pid=\d+\)|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)")
_MOST_WRAPPED_LINES = 100
_CONFIG = " with config: "
_VERSION = re.compile(
    r"vLLM API server version (\S{1,60})|Initializing a V\d LLM engine \(v([^)]{1,60})\)|█  version (\d\S{0,60})"
)
_KV_TOKENS = re.compile(r"\b([A-Z]{1,10})(?: \+ host)? KV cache size: ([\d,]{1,20}) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]{1,20}) tokens per request: (\d{1,12}\.\d\d)x")
_CONTEXT_PARALLEL = re.compile(r"Multiplying the GPU KV cache size by the [cd]c?p_world_size (\d{1,6})\b")
_HIT_RATE = re.compile(r"Prefix cache hit rate: (\d{1,3}(?:\.\d+)?)%")
_KV_USAGE = re.compile(r"KV cache usage: (\d{1,3}(?:\.\d+)?)%")
_FULL = 95.0  # % of the KV cache; beyond it requests are preempted
# What vLLM says of models that keep several kinds of KV cache (sliding windows, state space layers).
_HYBRID = re.compile(
    r"Setting attention block size to (\d{1,6}) tokens|Add \d+ padding layers, may waste|Padding mamba page size|"
    r"Hybrid KV cache manager is disabled for this hybrid model|kv cache group sizes \(\d+, \d"
)
# What a line says of the engine as it runs -> the engine arguments.
_RUNS_WITH: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], dict[str, object]]], ...] = (
    (re.compile(r"num_gpu_blocks(?:_override=| is: )(\d{1,12})\b"), lambda m: {"num_gpu_blocks": int(m[1])}),
    (re.compile(r"(?:Forcing|Setting) kv cache block size to (\d{1,6})\b"), lambda m: {"block_size": int(m[1])}),
    (
        re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,12})"),
        lambda m: {"enable_chunked_prefill": True, "max_num_batched_tokens": int(m[1])},
    ),
    (re.compile(r"Using max model len (\d{1,12})\b"), lambda m: {"max_model_len": int(m[1])}),
    (
        re.compile(r"Asynchronous scheduling is (enabled|disabled)"),
        lambda m: {"async_scheduling": m[1] == "enabled"},
    ),
    (
        re.compile(r"Async scheduling (?:[^\n]{0,120} )?(?:will be|is) disabled"),
        lambda _m: {"async_scheduling": False},
    ),
    (re.compile(r"etting pause state to (PAUSED_[A-Z]{1,20})\b"), lambda m: {"pause_state": m[1]}),
    (re.compile(r'"POST /(pause|sleep)(?:\?\S{0,200})? HTTP/[\d.]{1,4}" 200'), lambda m: {"pause_state": m[1]}),
)
# Every line above has one of these words; most of a log has none.
_MARKS = re.compile(
    rb"args: |engine \(v|version |cache|blocks|oncurrency|sync|hunked|max model len|on block|ing layers|mamba|"
    rb"pause state|POST /pause|POST /sleep"
)

# Fields of the engine's configuration line by engine argument; chunked prefill has another name up to 0.11.
_CONFIG_FIELDS = {
    "max_seq_len": "max_model_len",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    **{f"{name}_parallel_size": f"{name}_parallel_size" for name in ("tensor", "pipeline", "data", "decode_context")},
    **{name: name for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "kv_cache_dtype")},
    "speculative_config": "speculative_config",
}
_COMPILED_FIELDS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")


@dataclass
class ServerLog:
    """What the last start in the log says; engine arguments by vLLM's names.

    ``given``: what the server was started with, in full if ``listed``; ``resolved``: what its engine runs with.
    ``as_text``: those whose value is not a literal; ``cut``: their line has no end.  ``kv_tokens``: KV cache in tokens,
    wrong if the log ``contradicts_itself``.  ``hybrid``: what shows that the model keeps several kinds of it.
    ``offline``: vLLM's ``LLM`` class.
    ``prefix_hit_rate``: 0..1, of the last throughput line, over recent queries.  ``kv_full``: the KV cache was, once.
    """

    version: str | None = None
    model: str | None = None
    given: dict[str, object] = field(default_factory=dict)
    resolved: dict[str, object] = field(default_factory=dict)
    listed: bool = False
    as_text: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    kv_tokens: int | None = None
    context_parallel: int = 1
    hybrid: str = ""
    contradicts_itself: bool = False
    offline: bool | None = None
    prefix_hit_rate: float | None = None
    kv_full: bool = False
    starts: int = 0
    throughput: ThroughputLines = field(default_factory=ThroughputLines)

    def num_gpu_blocks(self, block_size: int) -> int | None:
        """KV blocks including the reserved one, from KV tokens and the block size; ``None`` if they do not tell.

        vLLM prints blocks times block size up to some 0.20, and later blocks over those of a request of
        ``max_model_len`` times that (v1/core/kv_cache_utils.py): the same where the block size divides it.
        """
        if self.kv_tokens is None or self.hybrid:
            return None
        tokens, longest = self.kv_tokens // self.context_parallel, self.resolved.get("max_model_len")
        if tokens % block_size and isinstance(longest, int) and longest:
            return -(-tokens * -(-longest // block_size) // longest) or None
        return tokens // block_size or None


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is the log of a vLLM server."""
    text = head.decode("utf-8", "replace")
    known = f"{_ARGUMENTS}{{" in text or any(pattern.search(text) for pattern in (_VERSION, _KV_TOKENS, _HIT_RATE))
    return known or begins_with_iterations(text)


def read_server_log(
    file: RecordedFile, iterations: IterationLines | None = None, log: ServerLog | None = None
) -> ServerLog:
    """What the log says about the server; fields stay ``None`` where it says nothing.

    Arguments that cannot be read are rejected and counted; other lines are not records.
    ``iterations``: takes the lines that tell what a step computed; ``log``: what earlier parts of a rotated log said.
    """
    log = log or ServerLog()
    for number, raw in _unwrapped(lines(file, MAX_LINE_BYTES)):
        if iterations is not None and iterations.take(file, number, raw):
            continue
        if _MARKS.search(raw) and _read_line(file, log, f"line {number}", raw.decode("utf-8", "replace")):
            file.tally.records += 1
    return log


def _unwrapped(numbered: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The lines of a log; a line of arguments that a terminal wrapped is whole again, with the number of its first."""
    wrapped: list[tuple[int, bytes]] = []
    for number, raw in numbered:
        if wrapped and (_BEGINS_A_LINE.match(raw) or len(wrapped) == _MOST_WRAPPED_LINES):
            yield from wrapped
            wrapped = []
        if not wrapped and _ARGUMENTS.encode() not in raw:
            yield number, raw
            continue
        wrapped.append((number, raw))
        joined = b"".join(part.rstrip(b"\r") for _number, part in wrapped)
        if _has_whole_arguments(joined):
            yield wrapped[0][0], joined
            wrapped = []
    yield from wrapped


def _has_whole_arguments(line: bytes) -> bool:
    """Whether the arguments of a line end in it, or are longer than any, or not of their form."""
    printed = line.partition(_ARGUMENTS.encode())[2].decode("utf-8", "replace")
    entries = read_mapping(printed[:MAX_ARGUMENTS_CHARS])
    return entries is None or entries.whole or len(printed) > MAX_ARGUMENTS_CHARS


def _read_line(file: RecordedFile, log: ServerLog, place: str, line: str) -> bool:
    log.throughput.take(line)
    if match := _HIT_RATE.search(line):
        log.prefix_hit_rate = min(1.0, float(match[1]) / 100)
        log.kv_full |= (usage := _KV_USAGE.search(line)) is not None and float(usage[1]) >= _FULL
    elif (at := line.find(_ARGUMENTS)) >= 0:
        _start(file, log, place, line, at + len(_ARGUMENTS))
    elif match := _VERSION.search(line):
        log.version = text(match[1] or match[2] or match[3])
        log.offline = False if match[1] or match[3] else log.offline
        if (at := line.find(_CONFIG)) >= 0:
            _read_config(file, log, place, line[at + len(_CONFIG) :])
    elif (match := _KV_TOKENS.search(line)) or _CONCURRENCY.search(line):
        if match:
            log.kv_tokens = int(match[2].replace(",", "") or 0) or None
            log.resolved.setdefault("device", "cuda" if match[1] == "GPU" else match[1].lower())
        if match := _CONCURRENCY.search(line):
            _see_concurrency(log, match)
    elif match := _HYBRID.search(line):
        log.hybrid = match[0]
        if match[1]:
            log.resolved["block_size"] = int(match[1])
    elif match := _CONTEXT_PARALLEL.search(line):
        log.context_parallel = max(1, int(match[1]))
    else:
        arguments = next((said(m) for pattern, said in _RUNS_WITH if (m := pattern.search(line))), {})
        log.resolved |= arguments
        return bool(arguments)
    return True


def _start(file: RecordedFile, log: ServerLog, place: str, line: str, at: int) -> None:
    """A server start: what an earlier start said no longer holds."""
    vars(log).update(vars(ServerLog(version=log.version, starts=log.starts + 1)))
    printed = line[at : at + MAX_ARGUMENTS_CHARS]
    entries = read_mapping(printed)
    if entries is None:
        file.tally.reject(place, "the engine arguments are not key: value pairs")
        return
    arguments = {argument_named(name): value for name, value in entries.values.items()}
    log.listed, log.cut = entries.whole, not entries.whole
    log.as_text = {name: str(value)[:80] for name, value in list(arguments.items())[:1000] if isinstance(value, Text)}
    log.given = {name: arguments[name] for name in ARGUMENTS if arguments.get(name) is not None}
    named = [name for key in ("quantization", "dtype") if (name := arguments.get(key)) not in (None, "auto")]
    log.given |= {"dtype": named[0]} if named else {}
    served = arguments.get("served_model_name")
    log.model = text(served[0] if isinstance(served, list) and served else served) or text(arguments.get("model"))
    of_a_server = any(name in arguments for name in ("model_tag", "host", "port", "served_model_name"))
    log.offline = not (of_a_server or "APIServer" in line[:at])


def _read_config(file: RecordedFile, log: ServerLog, place: str, config: str) -> None:
    if len(config) > MAX_ARGUMENTS_CHARS:
        file.tally.reject(place, f"an engine configuration of more than {MAX_ARGUMENTS_CHARS} characters")
    said = read_fields(config[:MAX_ARGUMENTS_CHARS]).values
    compiled = said.get("compilation_config")
    for name, argument in _CONFIG_FIELDS.items():
        if said.get(name) is not None:
            log.resolved[argument] = said[name]
    if isinstance(compiled, Mapping):
        log.resolved |= {name: compiled[name] for name in _COMPILED_FIELDS if compiled.get(name) is not None}
    log.resolved["dtype"] = next((said[k] for k in ("quantization", "dtype") if said.get(k) is not None), None)
    log.resolved["device"] = text(said.get("device_config"))
    log.resolved = {name: value for name, value in log.resolved.items() if value is not None}
    log.model = log.model or text(said.get("model"))


def _see_concurrency(log: ServerLog, match: re.Match[str]) -> None:
    """Up to some 0.20 the tokens of a hybrid model do not fit the concurrency, which is right (vllm#40384, #40691)."""
    longest = int(match[1].replace(",", "") or 0)
    fitting = float(match[2]) * longest
    counted = log.kv_tokens if longest and log.context_parallel == 1 else None
    if counted and abs(fitting - counted) > 0.02 * fitting + 0.01 * longest:
        log.contradicts_itself = True
        log.hybrid = f"{counted:,} tokens of KV cache against a {match[0][0].lower()}{match[0][1:]}"
