"""Ask vLLM's own front end and coordinator which rank each request goes to, and compare with the simulated balancer.

    NUMBA_DISABLE_JIT=1 python scripts/oracle_balancer.py messages COUNT FILE   what is reported, and who was chosen
    PYTHONPATH=vllm-0.24.0 oracle-env/bin/python scripts/oracle_balancer.py check FILE   the same of that release

The first is run in the project's environment and notes COUNT random workloads, the second in that of
`scripts/vllm_oracle.py`. Messages take no time; of what happens at one time, requests come first, then messages. Exit
codes: 0 all equal, 1 a decision differs.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RELEASES = ("0.12.0", "0.15.1", "0.24.0", "0.25.1", "0.32.0")
Case = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if len(arguments) == 3 and arguments[0] == "messages":
        cases = [simulated(index) for index in range(int(arguments[1]))]
        Path(arguments[2]).write_text(json.dumps(cases), "utf-8")
        return 0
    if len(arguments) == 2 and arguments[0] == "check":
        return check(json.loads(Path(arguments[1]).read_text("utf-8")))
    print(__doc__)
    return 2


def simulated(index: int) -> Case:
    """A random workload: every message and decision of the simulated balancer, and when requests were finished."""
    import numpy as np

    from blis_replay.blis.latency.models import LatencyModel
    from blis_replay.blis.parallel import balancer, ranks
    from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace, release_arguments

    rng = np.random.default_rng([9, index])
    release = RELEASES[index % len(RELEASES)]
    n, span_us, size = int(rng.integers(30, 90)), rng.choice([300_000, 2_000_000, 20_000_000]), int(rng.integers(2, 5))
    prompts, outputs = rng.integers(5, 200, n), rng.integers(1, 40, n)
    trace = RequestTrace(np.sort(rng.integers(0, span_us, n)), prompts, prompts, outputs, np.full(n, NEVER_US))
    engine = EngineConfig(
        max_num_seqs=int(rng.choice([2, 4, 16])),
        max_num_batched_tokens=256,
        max_model_len=4096,
        async_scheduling=bool(rng.random() < 0.5),
        num_gpu_blocks=int(rng.choice([40, 60, 400])),
        data_parallel_size=size,
        api_server_count=int(rng.choice([1, size])),
        mixture_of_experts=bool(rng.random() < 0.5),
        **release_arguments({"vllm_version": release}),
    )
    events: list[list[int]] = []
    hear, choose_rank = balancer.hear, balancer.choose_rank

    def note_message(known: Any, rank: int, message: Any) -> None:
        counts = message.counts
        events.append([message.at_us, 1, rank, message.step, counts.waiting, counts.running, counts.free_blocks])
        hear(known, rank, message)

    def note_decision(stack: Any, known: Any, request: int, now_us: int) -> int:
        events.append([now_us, 0, request, chosen := choose_rank(stack, known, request, now_us)])
        return chosen

    vars(balancer)["hear"], vars(ranks)["choose_rank"] = note_message, note_decision
    try:
        latency = LatencyModel("blackbox", 8_000_000, 30_000, 300_000)
        result, _ = ranks.simulate_ranks(trace, engine, latency)
    finally:
        vars(balancer)["hear"], vars(ranks)["choose_rank"] = hear, choose_rank
    return {
        "release": release,
        "ranks": size,
        "fronts": engine.api_server_count,
        "blocks": int(engine.num_gpu_blocks or 0) - 1,
        "lockstep": engine.mixture_of_experts or not engine.behaviours.dense_ranks_apart,
        "events": [[int(value) for value in event] for event in events],
        "finished_us": result.finished_us.tolist(),
    }


def check(cases: list[Case]) -> int:
    """Print how the cases of the release that is imported compare."""
    from oracle_vllm import vllm_version

    release = vllm_version()
    decisions, different = 0, 0
    for case in (case for case in cases if case["release"] == release):
        real = Real(case)
        real.run()
        decisions += real.decisions
        different += len(real.different)
        for at_us, request, ours, theirs in real.different[:1]:
            print(f"{release}: at {at_us} us request {request} goes to rank {theirs}, simulated {ours}")
    print(f"{release}: {decisions - different} of {decisions} decisions equal")
    return 1 if different else 0


class _DoneError(Exception):
    """Nothing is left to happen."""


class Real:
    """vLLM's coordinator loop in virtual time, its sockets replaced by the events of a case; front ends without any."""

    def __init__(self, case: Case) -> None:
        self.case, self.now_us, self.decisions = case, 0, 0
        self.different: list[tuple[int, int, int, int]] = []
        self.events: Iterator[list[int]] = iter(sorted(case["events"], key=lambda event: event[:2]))
        self.next = next(self.events, None)
        self.current: list[int] = []
        self.finished = sorted((at_us, request) for request, at_us in enumerate(case["finished_us"]))
        ranks, fronts = case["ranks"], case["fronts"]
        self.fronts = [
            SimpleNamespace(
                lb_engines=[_no_counts() for _ in range(ranks)],
                client_count=fronts,
                core_engines=list(range(ranks)),
                reqs_in_flight={},
                streaming_reqs=set(),
                engine_inflight=Counter(),
                eng_start_index=ranks * front // fronts,
                awake=False,
            )
            for front in range(fronts)
        ]

    def run(self) -> None:
        """Let everything happen."""
        from vllm.v1.engine import coordinator

        sockets = iter([front := _Socket(self, "front"), back := _Socket(self, "ranks"), _Socket(self, "control")])
        self.sockets = {0: front, 1: back}
        poller = SimpleNamespace(register=lambda *_: None, poll=self.poll)
        vars(coordinator).update(
            make_zmq_socket=lambda **_: next(sockets),
            zmq=SimpleNamespace(Poller=lambda: poller, POLLIN=1, XPUB=1, PULL=2, LAST_ENDPOINT=1),
            time=SimpleNamespace(time=lambda: self.now_us / 1e6),
            MsgpackDecoder=lambda *_: SimpleNamespace(decode=lambda message: message),
        )
        process = object.__new__(coordinator.DPCoordinatorProc)
        process.ctx, process.stats_update_interval_ms = None, 100
        process.engines = [coordinator.EngineState() for _ in range(self.case["ranks"])]
        process.enable_wave_coordination = self.case["lockstep"]
        process._send_start_wave = lambda *_: None
        try:
            process.process_input_socket("front", "ranks", "control")
        except _DoneError:
            return

    def poll(self, timeout: float) -> list[tuple[Any, int]]:
        """The next message up to a time; decisions on the way are taken."""
        until_us = self.now_us + int(timeout) * 1_000
        while self.next is not None and self.next[0] <= until_us:
            self.current, self.next = self.next, next(self.events, None)
            self.now_us = max(self.now_us, self.current[0])
            if self.current[1] == 1 or self.decide(*self.current):
                return [(self.sockets[self.current[1]], 1)]
        if self.next is None:
            raise _DoneError
        self.now_us = max(self.now_us, until_us)
        return []

    def decide(self, at_us: int, _: int, request: int, simulated_rank: int) -> bool:
        """The front end's choice; whether it tells the coordinator that it wakes the ranks."""
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        while self.finished and self.finished[0][0] < at_us:
            done = self.finished.pop(0)[1]
            of = self.fronts[done % len(self.fronts)]
            of.engine_inflight[of.reqs_in_flight.pop(str(done))] -= 1
        front = self.fronts[request % len(self.fronts)]
        asked = SimpleNamespace(request_id=str(request), data_parallel_rank=None, pooling_params=None, resumable=False)
        rank = DPLBAsyncMPClient.get_core_engine_for_request(front, asked)
        front.reqs_in_flight[str(request)] = rank
        self.decisions += 1
        if rank != simulated_rank:
            self.different.append((at_us, request, simulated_rank, rank))
        woke, front.awake = not front.awake, True
        return woke


class _Socket:
    """A socket of the coordinator."""

    def __init__(self, real: Real, name: str) -> None:
        self.real, self.name = real, name

    def __enter__(self) -> "_Socket":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def getsockopt(self, *_: object) -> bytes:
        return b""

    def recv(self) -> Any:
        """A rank subscribes, a front end wakes the ranks, or a rank reports."""
        import msgspec
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        if self.name == "control":
            return b"\x01"
        if self.name == "front":
            return msgspec.msgpack.encode((0, 0))
        _, _, rank, step, waiting, running, free_blocks = self.real.current
        used = 1.0 - free_blocks / self.real.case["blocks"]
        stats = SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, step_counter=step, kv_cache_usage=used
        )
        return EngineCoreOutputs(engine_index=rank, scheduler_stats=stats)

    def send(self, message: bytes) -> None:
        """What is published reaches all front ends."""
        import msgspec

        if self.name != "front":
            return
        counts, _, running = msgspec.msgpack.decode(message)
        for front in self.real.fronts:
            front.awake = running
            if counts is not None:
                front.lb_engines = [list(rank) for rank in counts]


def _no_counts() -> list[float]:
    """What a front end knows of a rank at first, as many numbers as the release has."""
    from vllm.v1.engine.coordinator import EngineState

    return list(EngineState().request_counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
