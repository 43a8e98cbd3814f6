"""As much of vLLM as the recorder looks at: a small scheduler that keeps its books, and a server around it.

As a program it is such a server: ``python fake_vllm.py serve MODEL --port N`` loads the plugins that its environment
has, answers ``/metrics``, serves some requests and then waits for a signal, on which it ends with code 7.
"""

from __future__ import annotations

import http.server
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

BLOCK = 16
BLOCKS = 100
PauseState = Enum("PauseState", "UNPAUSED PAUSED_NEW PAUSED_ALL")
Status = Enum("Status", "WAITING RUNNING FINISHED_LENGTH_CAPPED FINISHED_ABORTED")


@dataclass
class Request:
    """Of vllm.v1.request.Request what is looked at."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    prompt: str = ""
    arrival_time: float = field(default_factory=time.time)
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    priority: int = 0
    status: Status = Status.WAITING
    mm_features: list[object] = field(default_factory=list)
    use_structured_output: bool = False
    sampling_params: object = None
    pooling_params: object = None

    @property
    def block_hashes(self) -> list[bytes]:
        """One hash for each full block of the prompt; equal prompts begin alike."""
        return [f"{self.prompt}{block}".encode() for block in range(self.num_prompt_tokens // BLOCK)]


@dataclass
class CachedRequestData:
    """Of vllm.v1.core.sched.output.CachedRequestData."""

    req_ids: list[str]
    num_computed_tokens: list[int]
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class SchedulerOutput:
    """Of vllm.v1.core.sched.output.SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[SimpleNamespace]
    scheduled_cached_reqs: CachedRequestData
    preempted_req_ids: set[str] = field(default_factory=set)


class Scheduler:
    """First come first served, within a token budget; each request holds whole blocks until it ends."""

    def __init__(self, max_num_seqs: int = 4, max_num_batched_tokens: int = 64) -> None:
        settings = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(**settings, async_scheduling=False, policy="fcfs", watermark=0.0),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_index=0),
            model_config=SimpleNamespace(model="some/model", max_model_len=2048),
        )
        self.block_size, self.budget, self.most = BLOCK, max_num_batched_tokens, max_num_seqs
        self.kv_cache_manager = SimpleNamespace(block_pool=self)
        self.num_gpu_blocks = BLOCKS
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds, without the reserved one."""
        return BLOCKS - 1 - sum(-(-request.num_computed_tokens // BLOCK) for request in self.running)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.running), len(self.waiting)

    def add_request(self, request: Request) -> None:
        """A request joins the queue."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Running requests first, then waiting ones."""
        tokens: dict[str, int] = {}
        cached = CachedRequestData([], [])
        left, new = self.budget, []
        for request in self.running:
            count = min(left, request.num_prompt_tokens + request.num_output_tokens - request.num_computed_tokens)
            if count:
                tokens[request.request_id] = count
                cached.req_ids.append(request.request_id)
                cached.num_computed_tokens.append(request.num_computed_tokens)
            left -= count
        while left and self.waiting and len(self.running) < self.most:
            request = self.waiting.pop(0)
            self.running.append(request)
            new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed_tokens))
            tokens[request.request_id] = min(left, request.num_prompt_tokens)
            left -= tokens[request.request_id]
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return SchedulerOutput(tokens, new, cached)

    def update_from_output(self, output: SchedulerOutput, _model_output: object) -> dict[int, object]:
        """A token for each request whose prompt is done."""
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request and request.num_computed_tokens >= request.num_prompt_tokens + request.num_output_tokens:
                request.num_output_tokens += 1
                if request.num_output_tokens == request.max_tokens:
                    self._end(request, Status.FINISHED_LENGTH_CAPPED)
        return {}

    def finish_requests(self, name: str, status: Status) -> None:
        """Its client is gone."""
        self._end(self.requests[name], status)

    def _end(self, request: Request, status: Status) -> None:
        request.status = status
        (self.running if request in self.running else self.waiting).remove(request)
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]

    def set_pause_state(self, state: PauseState) -> None:
        """Nothing is scheduled any more, or again."""
        self.paused = state

    def shutdown(self) -> None:
        """Nothing to do."""

    def serve(self, pause_s: float = 0.0) -> None:
        """Steps until nothing is left."""
        while self.running or self.waiting:
            output = self.schedule()
            time.sleep(pause_s)
            self.update_from_output(output, None)


def modules() -> dict[str, ModuleType]:
    """What ``import`` shall find of vLLM."""
    found = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")}
    for name, contents in (
        ("vllm.version", {"__version__": "0.32.0"}),
        ("vllm.v1.request", {"Request": Request}),
        ("vllm.v1.core.sched.output", {"SchedulerOutput": SchedulerOutput, "CachedRequestData": CachedRequestData}),
        ("vllm.v1.core.sched.scheduler", {"Scheduler": Scheduler}),
    ):
        found[name] = ModuleType(name)
        found[name].__dict__.update(contents)
    for name, module in found.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(found[parent], own, module)
    return found


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 0\n")

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


def main() -> None:
    """The server."""
    sys.modules.update(modules())
    for plugin in entry_points(group="vllm.general_plugins"):
        plugin.load()()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Metrics)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    scheduler = Scheduler()
    for number in range(5):
        scheduler.add_request(Request(f"cmpl-bench-0000-{number}-0-{number:08x}", 40 + number, 3 + number))
    scheduler.serve()
    print("served", " ".join(argument for argument in sys.argv if "otlp" in argument), flush=True)
    ended.wait(60)
    scheduler.shutdown()
    sys.exit(7)


if __name__ == "__main__":
    main()
