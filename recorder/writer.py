"""The file of a recording, written by its own thread: gzipped JSON lines (``docs/record.md``).

The engine only appends to a bounded buffer; records that do not fit are dropped and counted.  Every half second
becomes a gzip member that ends with counters.  So a server may be killed at any time, as vLLM kills its engine at
every ordinary end: at most the last member is lost, and the file stays readable.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

# Version of the form of the file.
FORM = 1
_MOST_TEXT = 300
# Engine argument -> where the configuration has it.
_SETTINGS = {
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_model_len": "model_config.max_model_len",
    "async_scheduling": "scheduler_config.async_scheduling",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "scheduling_policy": "scheduler_config.policy",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "kv_cache_dtype": "cache_config.cache_dtype",
}
_CONFIGURATIONS = ("scheduler_config", "cache_config", "parallel_config", "speculative_config")


def facts_of(scheduler: Any) -> dict[str, Any]:
    """The header of a file, as JSON has it: see ``docs/record.md``."""
    config = getattr(scheduler, "vllm_config", None)
    pool = _at(scheduler, "kv_cache_manager.block_pool")
    found = {name: _plain(_at(config, place)) for name, place in _SETTINGS.items()}
    settings = {
        **{name: value for name, value in found.items() if value is not None},
        "block_size": _plain(getattr(scheduler, "block_size", None)),
        "num_gpu_blocks": _plain(getattr(pool, "num_gpu_blocks", None)),
    }
    return {
        "vllm": _version(),
        "python": platform.python_version(),
        "pid": os.getpid(),
        "engine": _engine_index(config),
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "model": _plain(_at(config, "model_config.model")),
        "settings": settings,
        "hash_block_size": _plain(getattr(scheduler, "hash_block_size", None)) or settings["block_size"],
        "kv_cache_groups": [spec["kind"] for spec in _groups(scheduler)],
        "kv_cache_specs": _groups(scheduler),
        "speculative_tokens": _plain(getattr(scheduler, "num_spec_tokens", 0)) or 0,
        "config": {name: dict(_fields(getattr(config, name, None))) for name in _CONFIGURATIONS},
        "absent": sorted(_absent(scheduler)),
    }


def queue_depths_of(scheduler: Any) -> tuple[int, int]:
    """Requests in the running list, and in the waiting queues."""
    count = getattr(scheduler, "get_request_counts", None)
    if count is None:
        return len(scheduler.running), len(scheduler.waiting)
    running, waiting = count()
    return running, waiting


def free_blocks_of(scheduler: Any) -> int:
    """Free blocks of the KV cache, with those that hold a cached prefix nobody uses; -1 if they cannot be counted."""
    pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
    return -1 if pool is None else int(pool.get_num_free_blocks())


def _absent(scheduler: Any) -> Iterator[str]:
    """What is recorded of other versions and not of this one."""
    if not hasattr(scheduler, "get_request_counts"):
        yield "Scheduler.get_request_counts"
    if not hasattr(scheduler, "_free_request"):
        yield "Scheduler._free_request"
    if _at(scheduler, "kv_cache_manager.block_pool") is None:
        yield "KVCacheManager.block_pool"
    try:
        from vllm.v1.core.sched import output  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]
    except Exception:
        yield "vllm.v1.core.sched.output"
        return
    for owner, name in (("SchedulerOutput", "preempted_req_ids"), ("CachedRequestData", "resumed_req_ids")):
        if name not in getattr(getattr(output, owner, None), "__dataclass_fields__", {}):
            yield f"{owner}.{name}"
    named = getattr(getattr(Request, "__init__", None), "__code__", None)
    for name in ("num_preemptions", "block_hashes"):
        if named is not None and name not in named.co_names:
            yield f"Request.{name}"


def _at(value: Any, place: str) -> Any:
    for name in place.split("."):
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> Any:
    """A number, a switch or a short text: what JSON holds."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(getattr(value, "value", value))[:_MOST_TEXT]


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(getattr(config, "__dict__", {}).items()):
        if not name.startswith("_") and not callable(value):
            yield name, _plain(value)


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    """Kind and sizes of each group of layers that has blocks of its own; more than one is a hybrid model."""
    specs = [getattr(group, "kv_cache_spec", None) for group in _at(scheduler, "kv_cache_config.kv_cache_groups") or ()]
    sizes = ("block_size", "sliding_window", "attention_chunk_size", "mamba_cache_mode")
    return [
        {"kind": type(spec).__name__} | {n: _plain(v) for n in sizes if (v := getattr(spec, n, None)) is not None}
        for spec in specs[:64]
    ]


def _engine_index(config: Any) -> int:
    parallel = getattr(config, "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        index = getattr(parallel, name, None)
        if isinstance(index, int):
            return index
    return 0


def _version() -> str:
    try:
        from vllm.version import __version__  # type: ignore[import-not-found,unused-ignore]
    except Exception:
        return "unknown"
    return str(__version__)


STEP, UPDATE, ARRIVAL, FINISH, PAUSE = "s", "u", "a", "f", "p"
COUNTERS, END = "c", "end"
# Scheduled requests and block hashes that wait to be written: some 30 MB.
MOST_WAITING = 300_000
FLUSH_S = 0.5
_WAKE_S = 0.25
_CLOSE_S = 5.0
# Beginnings of prompts that are remembered, to tell which prompts begin alike: some 20 MB.
MOST_PREFIXES = 200_000
MOST_NAMES = 200_000

Record = tuple[Any, ...]


def new_file(folder: str, facts: dict[str, Any]) -> Path:
    """The path of a file that is not there yet, in a folder that is made; ``OSError`` if it cannot be."""
    parent = Path(folder)
    parent.mkdir(parents=True, exist_ok=True)
    return parent / f"steps-engine{facts['engine']}-{facts['pid']}-{time.time_ns() // 1_000_000}.jsonl.gz"


class Writer:
    """Takes records from the engine's thread and writes them in its own; ``failed`` is called with what ends it early.

    Raises ``OSError`` if the file cannot be made.
    """

    def __init__(self, path: Path, facts: dict[str, Any], failed: Callable[[Exception], None]) -> None:
        self.path, self._failed = path, failed
        self._stream = path.open("xb")
        self._packer = _packer()
        self._lines = _Lines(time.monotonic_ns(), int(facts["hash_block_size"] or 1))
        self._waiting: deque[tuple[Record, int]] = deque()
        # Each is counted by one thread alone: what was put down by the engine's, what was taken up by this one.
        self._put = self._taken = 0
        self.dropped = 0
        self._wake, self._ended = threading.Event(), False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="blis-replay-recorder", daemon=True)
        started = {"monotonic_ns": self._lines.zero_ns, "wall_ns": time.time_ns()}
        header = {"blis_replay_steps": FORM, "started": started, **facts}
        try:
            self._write(json.dumps(header, separators=(",", ":")) + "\n")
            self._flush()
        except OSError:  # a full disk: nothing is left that looks like a recording
            with suppress(OSError):
                self._stream.close()
            path.unlink(missing_ok=True)
            raise

    def start(self) -> None:
        """Begin to write; the file is completed when the process ends in good order."""
        self._thread.start()
        atexit.register(self.close)
        # A process that multiprocessing has forked runs these and no other exit handlers.
        Finalize(None, self.close, exitpriority=100)

    def put(self, record: Record, size: int) -> None:
        """Have a record written that refers to ``size`` things; it is dropped where too many wait."""
        if self._put - self._taken > MOST_WAITING:
            self.dropped += 1
            return
        self._put += size
        self._waiting.append((record, size))

    def close(self) -> None:
        """Write what is left and the last counters."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def abandon(self) -> bool:
        """Write no more; whether this is the first that ends it."""
        with self._lock:
            first, self._ended = not self._ended, True
        self._waiting.clear()
        self._wake.set()
        return first

    def _run(self) -> None:
        try:
            flushed = time.monotonic()
            while not self._ended:
                self._wake.wait(_WAKE_S)
                self._drain()
                if self._lines.news and time.monotonic() - flushed >= FLUSH_S:
                    self._write(self._lines.counters(COUNTERS, self.dropped))
                    self._flush()
                    flushed = time.monotonic()
            self._drain()
            self._write(self._lines.counters(END, self.dropped))
            self._flush()
            self._stream.close()
        except Exception as error:
            self._failed(error)

    def _drain(self) -> None:
        while self._waiting:
            record, size = self._waiting.popleft()
            self._write(self._lines.of(record))
            self._taken += size
            # The engine gets the interpreter back after each line, instead of after a switch interval of 5 ms.
            time.sleep(0)

    def _write(self, line: str) -> None:
        if packed := self._packer.compress(line.encode()):
            self._stream.write(packed)

    def _flush(self) -> None:
        self._stream.write(self._packer.flush())
        self._stream.flush()
        self._packer = _packer()


def _packer() -> Any:
    return zlib.compressobj(6, wbits=31)


class _Lines:
    """Records as lines: requests by number, times in ns since ``zero_ns`` of the monotonic clock."""

    def __init__(self, zero_ns: int, block_tokens: int) -> None:
        self.zero_ns, self._block_tokens = zero_ns, block_tokens
        self.news = False
        self._numbers: dict[str, int] = {}
        self._ended: list[tuple[str, int]] = []  # since the last update
        self._next = 0
        self._prompts: dict[int, int] = {}  # hash of a block with all before it -> the first request that had it
        self._written = dict.fromkeys((STEP, UPDATE, ARRIVAL, FINISH, PAUSE), 0)
        self._tokens = self._cost_ns = self._forgotten = 0

    def of(self, record: Record) -> str:
        kind = record[0]
        self._written[kind] += 1
        self.news = True
        if kind == STEP:
            return self._step(*record[1:])
        if kind == UPDATE:
            return self._update(*record[1:])
        if kind == ARRIVAL:
            return self._arrival(*record[1:])
        if kind == PAUSE:
            return json.dumps([PAUSE, record[1] - self.zero_ns, record[2]], separators=(",", ":")) + "\n"
        return self._finish(*record[1:])

    def counters(self, kind: str, dropped: int) -> str:
        """What was written up to here, and what it cost: in the wrappers, and in the thread that writes."""
        self.news = False
        counts = {
            "steps": self._written[STEP],
            "updates": self._written[UPDATE],
            "arrivals": self._written[ARRIVAL],
            "finished": self._written[FINISH],
            "scheduled_tokens": self._tokens,
            "dropped": dropped,
            "prefixes_forgotten": self._forgotten,
            "wrapper_ns": self._cost_ns,
            "writer_ns": time.thread_time_ns(),
        }
        return json.dumps([kind, time.monotonic_ns() - self.zero_ns, counts], separators=(",", ":")) + "\n"

    def _step(
        self,
        step: int,
        begin_ns: int,
        end_ns: int,
        running: int,
        waiting: int,
        free: int,
        cost_ns: int,
        tokens: dict[str, int],
        admitted: list[tuple[str, int]],
        preempted: tuple[str, ...],
    ) -> str:
        announced: list[str] = []
        number = self._number
        ones = [number(name, announced) for name, count in tokens.items() if count == 1]
        others = [(number(name, announced), count) for name, count in tokens.items() if count != 1]
        found = [(number(name, announced), computed) for name, computed in admitted]
        lost = [number(name, announced) for name in preempted]
        self._tokens += sum(tokens.values())
        self._cost_ns += cost_ns
        times = f"{begin_ns - self.zero_ns:d},{end_ns - begin_ns:d},{cost_ns:d}"
        depths = f"{running:d},{waiting:d},{free:d}"
        lists = f"{_listed(ones)},{_listed(others)},{_listed(found)},{_listed(lost)}"
        return "".join(announced) + f'["{STEP}",{step:d},{times},{depths},{lists}]\n'

    def _update(self, step: int | None, begin_ns: int, end_ns: int, produced: list[tuple[str, int]]) -> str:
        announced: list[str] = []
        counts = _listed([(self._number(name, announced), count) for name, count in produced])
        times = f"{begin_ns - self.zero_ns:d},{end_ns - begin_ns:d}"
        shown = "null" if step is None else f"{step:d}"
        for name, number in self._ended:
            if self._numbers.get(name) == number:  # else the name is another request's by now
                del self._numbers[name]
        self._ended.clear()
        return "".join(announced) + f'["{UPDATE}",{shown},{times},{counts}]\n'

    def _arrival(
        self,
        name: str,
        queued_ns: int,
        now_ns: int,
        wall_ns: int,
        arrival_s: float | None,
        prompt_tokens: int,
        max_tokens: int,
        priority: int,
        features: list[str],
        hashes: tuple[Any, ...],
    ) -> str:
        number = self._numbers[name] = self._next
        self._next += 1
        parent, blocks = self._begins_like(number, hashes)
        # When the API server had it, on the wall clock, in ns as far as a double has them.
        arrived_ns = None if arrival_s is None else round(arrival_s * 1e6) * 1000
        stamps = (queued_ns - self.zero_ns, now_ns - self.zero_ns, wall_ns, arrived_ns)
        lengths = (prompt_tokens, max_tokens, priority, parent, blocks * self._block_tokens)
        values = (number, str(name), *stamps, *lengths, *([features] if features else ()))
        return json.dumps([ARRIVAL, *values], separators=(",", ":")) + "\n"

    def _finish(
        self, name: str, at_ns: int, status: str, output_tokens: int, preemptions: int | None, computed_tokens: int
    ) -> str:
        announced: list[str] = []
        values = (self._number(name, announced), at_ns - self.zero_ns, status)
        self._ended.append((name, values[0]))  # the update in which it ended names it once more
        counts = (output_tokens, preemptions, computed_tokens)
        return "".join(announced) + json.dumps([FINISH, *values, *counts], separators=(",", ":")) + "\n"

    def _number(self, name: str, announced: list[str]) -> int:
        """The number of a request; one whose arrival was dropped is announced by its name alone."""
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) >= MOST_NAMES:
                self._numbers.clear()
            number = self._numbers[name] = self._next
            self._next += 1
            announced.append(json.dumps([ARRIVAL, number, str(name)], separators=(",", ":")) + "\n")
        return number

    def _begins_like(self, number: int, hashes: tuple[Any, ...]) -> tuple[int | None, int]:
        """The first request whose prompt shares the most whole blocks with this one, and how many they are."""
        if len(self._prompts) + len(hashes) > MOST_PREFIXES:
            self._forgotten += len(self._prompts)
            self._prompts.clear()
        parent, blocks = None, 0
        for place, block_hash in enumerate(hashes[:MOST_PREFIXES], 1):
            # A block's hash covers all before it, so where one is known, those before it are.
            before = self._prompts.setdefault(hash(block_hash), number)
            if before != number:
                parent, blocks = before, place
        return parent, blocks


def _listed(values: list[Any]) -> str:
    """Numbers, or pairs of them, as JSON has them."""
    return json.dumps(values, separators=(",", ":"), default=int)
