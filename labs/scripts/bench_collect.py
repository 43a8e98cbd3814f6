"""Measure the collector: spans per second on one core with none lost, and what happens beyond it.

The collector is a process on one core, its clients are on the others.  Messages are
serialised beforehand, so that the clients cost little; each client sends the next batch
when the last one is acknowledged, and sends a refused one again as exporters do.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_engine import Row

SECONDS = 6.0
COLLECTOR_CORE = 1


@dataclass(frozen=True)
class Load:
    """What a client sends: spans of so many events, so many of them in a batch."""

    what: str
    scope: str
    event: str
    events: int
    spans: int


# A step span of the SDK's 128 events; a request span of five (QUEUED to FINISHED).  18 attributes an event, as traced.
STEP = Load("step spans (128 events)", "vllm.scheduler.step", "step.BATCH_SUMMARY", 128, 8)
JOURNEY = Load("request spans (5 events)", "vllm.scheduler", "journey.SCHEDULED", 5, 512)


def message(load: Load) -> bytes:
    """A serialised export request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = "vllm"
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = load.scope
    for _ in range(load.spans):
        span = scope_spans.spans.add(trace_id=os.urandom(16), span_id=os.urandom(8), name="llm_core", kind=1)
        for number in range(load.events):
            event = span.events.add(name=load.event, time_unix_nano=time.time_ns())
            for place in range(18):
                event.attributes.add(key=f"batch.num_tokens_{place:02}").value.int_value = 1_000 * number + place
    return request.SerializeToString()


def collect(folder: Path) -> Iterator[Row]:
    """Spans per second on one core: both kinds of span over both transports, and beyond saturation."""
    for load in (JOURNEY, STEP):
        for transport in ("grpc", "http"):
            yield measured(folder, load, transport, clients=4)
    yield measured(folder, JOURNEY, "grpc", clients=128)
    yield measured(folder, JOURNEY, "http", clients=128)
    yield attacked(folder, ())
    yield attacked(folder, tuple(bombs(LARGEST)))
    for way in SENDERS:
        yield attacked(folder, tuple(bombs(LARGEST)), (way,), 50)
    yield attacked(folder, tuple(bombs(4 * LARGEST)), ("grpc",), 50)


def measured(folder: Path, load: Load, transport: str, clients: int) -> Row:
    """One collector under one load; exits if a batch that was acknowledged is not on disk."""
    directory = folder / f"{transport}-{load.events}-{clients}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "blis_replay.validate.cli.main", "collect", "--json", "--no-ingest"),
            *("--out", str(directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {COLLECTOR_CORE % (os.cpu_count() or 1)}),
    )
    stdout = process.stdout
    if stdout is None:
        sys.exit("the collector has no output")
    where = json.loads(stdout.readline())["listening"][transport]
    cpu_before = cpu_of(process.pid)
    in_time, acknowledged, refused = sent_to(where, load, transport, clients)
    cpu_us_a_span = 1e6 * (cpu_of(process.pid) - cpu_before) / (acknowledged * load.spans)
    process.send_signal(signal.SIGTERM)
    counts = json.loads(stdout.read())["collected"]
    _, _, usage = os.wait4(process.pid, 0)
    on_disk = spans_on_disk(directory)
    if not acknowledged * load.spans == counts["spans"] == on_disk:
        sys.exit(f"{acknowledged * load.spans} spans acknowledged, {counts['spans']} counted, {on_disk} on disk")
    remark = (
        f"{in_time * load.spans / SECONDS:,.0f} spans/s, {in_time * len(message(load)) / SECONDS / 1e6:.0f} MB/s, "
        f"{cpu_us_a_span:.1f} us of CPU a span; {on_disk:,} spans, none lost, {refused:,} batches retried"
    )
    what = f"collect, {load.what} over {'gRPC' if transport == 'grpc' else 'HTTP'}, {clients} clients"
    return Row(what, SECONDS, usage.ru_maxrss / 1024, remark)


EXPORTERS, BATCHES = 100, 4
LARGEST = 4 << 20  # of a message, unless --max-message says more
SMALL = Load("request spans (5 events)", "vllm.scheduler", "journey.SCHEDULED", 5, 64)


def bombs(size: int) -> Iterator[bytes]:
    """Messages of so many bytes that are nothing but empty parts, or as many of them as are taken."""
    scope, span, event, parts = b"\x12", b"\x12", b"\x5a", size // 2 - 9
    yield b"\x0a\x00" * parts  # resources
    yield nested(span + b"\x00", parts, b"\x0a", scope)
    yield nested(event + b"\x00", parts, b"\x0a", scope, span)
    spans = min(parts // 405, 19_900)
    yield nested(nested(b"\x4a\x00", 400, span), spans, b"\x0a", scope)  # attributes of spans
    yield nested(nested(event + b"\x00", (size >> 3) - 9, span), 3, b"\x0a", scope)


def nested(unit: bytes, count: int, *fields: bytes) -> bytes:
    """So many parts, within messages of these fields, the outermost first."""
    content = unit * count
    for field in reversed(fields):
        length, rest = b"", len(content)
        while rest >= 0x80:
            length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
        content = field + length + bytes([rest]) + content
    return content


def attacked(
    folder: Path, messages: tuple[bytes, ...], ways: tuple[str, ...] = ("grpc", "http"), attackers_a_way: int = 1
) -> Row:
    """100 exporters with four batches each; besides them so many attackers send these one after the other."""
    directory = (
        folder / f"attacked-{len(messages)}-{attackers_a_way}-{'-'.join(ways)}-{max(map(len, messages), default=0)}"
    )
    command = [sys.executable, "-m", "blis_replay.validate.cli.main", "collect", "--json", "--no-ingest"]
    process = subprocess.Popen(
        [*command, "--out", str(directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdout is None:
        sys.exit("the collector has no output")
    where = json.loads(process.stdout.readline())["listening"]
    context, ended = multiprocessing.get_context("spawn"), multiprocessing.get_context("spawn").Event()
    attackers = [
        context.Process(target=attack, args=(where[way], way, messages, ended, attackers_a_way)) for way in ways
    ]
    for attacker in attackers if messages else ():
        attacker.start()
    with context.Pool(4) as pool:
        answers = pool.starmap(exporters, [(where["grpc"], EXPORTERS // 4)] * 4)
    ended.set()
    for attacker in attackers if messages else ():
        attacker.join()
    process.send_signal(signal.SIGTERM)
    counts = json.loads(process.stdout.read())["collected"]
    _, _, usage = os.wait4(process.pid, 0)
    seconds, acknowledged = sorted(s for answer in answers for s in answer[0]), sum(answer[1] for answer in answers)
    lost = acknowledged * SMALL.spans - spans_on_disk(directory)
    remark = (
        f"{acknowledged} of {EXPORTERS * BATCHES} batches acknowledged, {max(lost, 0)} spans of them lost, "
        f"{len(seconds) - acknowledged} calls told to retry; answers: median {seconds[len(seconds) // 2]:.2f} s, "
        f"slowest {seconds[-1]:.2f} s; {usage.ru_utime + usage.ru_stime:.1f} s of CPU; of the attack "
        f"{counts['malformed_requests']} messages refused, {counts['refused_requests']} told to retry"
    )
    attack_of = (
        f", {attackers_a_way} attackers over {' and '.join(ways)}, up to {max(map(len, messages), default=0) >> 20} MB"
    )
    what = f"collect, {EXPORTERS} exporters{attack_of if messages else ''}"
    return Row(what, seconds[-1], usage.ru_maxrss / 1024, remark)


def attack(where: str, way: str, messages: tuple[bytes, ...], ended: Any, count: int) -> None:
    """So many connections, each with one message after the other until it is over."""
    from concurrent.futures import ThreadPoolExecutor

    def attacker(number: int) -> None:
        with SENDERS[way](where) as attempt:
            while not ended.is_set():
                number += 1
                attempt(messages[number % len(messages)])

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(attacker, range(count)))


def exporters(where: str, count: int) -> tuple[list[float], int]:
    """Some exporters, a thread each: how long each answer took, and how many batches were acknowledged."""
    from concurrent.futures import ThreadPoolExecutor

    body, seconds = message(SMALL), []

    def exporter(_number: int) -> int:
        acknowledged = 0
        with over_grpc(where) as attempt:
            for _ in range(BATCHES):
                for _attempt in range(6):
                    begin = time.monotonic()
                    taken = attempt(body)
                    seconds.append(time.monotonic() - begin)
                    if taken:
                        acknowledged += 1
                        break
                    time.sleep(1)
        return acknowledged

    with ThreadPoolExecutor(count) as threads:
        return seconds, sum(threads.map(exporter, range(count)))


def sent_to(where: str, load: Load, transport: str, clients: int) -> tuple[int, ...]:
    """Batches acknowledged in time, acknowledged at all, and refusals that the clients of some processes counted."""
    context = multiprocessing.get_context("spawn")
    processes = min(clients, 4)
    with context.Pool(processes) as pool:
        share = clients // processes
        answers = pool.starmap(clients_of, [(where, load, transport, share)] * processes)
    return tuple(map(sum, zip(*answers, strict=True)))


def clients_of(where: str, load: Load, transport: str, count: int) -> tuple[int, ...]:
    """``count`` clients, a thread each, until the time is over; then each has its last batch acknowledged."""
    from concurrent.futures import ThreadPoolExecutor

    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - {COLLECTOR_CORE} or {0})
    body = message(load)
    send = SENDERS[transport]
    begin = time.monotonic()

    def client() -> tuple[int, int, int]:
        in_time = acknowledged = refused = 0
        with send(where) as attempt:
            while time.monotonic() < begin + SECONDS or not acknowledged:
                while not attempt(body):
                    refused += 1
                    time.sleep(1)  # as both transports were asked to
                acknowledged += 1
                in_time += time.monotonic() < begin + SECONDS
        return in_time, acknowledged, refused

    with ThreadPoolExecutor(count) as threads:
        answers = list(threads.map(lambda _: client(), range(count)))
    return tuple(map(sum, zip(*answers, strict=True)))


@contextmanager
def over_grpc(where: str) -> Iterator[Callable[[bytes], bool]]:
    """Sends a batch over a channel of its own, and says whether it was acknowledged."""
    import grpc

    with grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")

        def attempt(body: bytes) -> bool:
            try:
                export(body, timeout=30)
            except grpc.RpcError:
                return False
            return True

        yield attempt


@contextmanager
def over_http(where: str) -> Iterator[Callable[[bytes], bool]]:
    """Sends a batch over a connection of its own, and says whether it was acknowledged."""
    with closing(http.client.HTTPConnection(where, timeout=30)) as connection:

        def attempt(body: bytes) -> bool:
            try:
                connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                return False
            return answer.status == 200

        yield attempt


SENDERS = {"grpc": over_grpc, "http": over_http}


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spans_on_disk(directory: Path) -> int:
    """Spans in the segments, read by framing and opentelemetry-proto alone."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from blis_replay_labs.collector.frames import frame_spans
    from blis_replay_labs.collector.segments import segments

    count = 0
    for path in segments(directory):
        with path.open("rb") as segment:
            for at, length in frame_spans(path):
                segment.seek(at)
                request = ExportTraceServiceRequest.FromString(segment.read(length))
                count += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    return count
