"""The collector as a process of its own: killed, out of disk, signalled under load, alone in its directory."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from collecting import stored_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from blis_replay_labs.collector.segments import segments

pytestmark = pytest.mark.slow

SPANS_PER_BATCH = 20
# How long exporters try again and tests wait: a busy machine takes more than the SDK's 10 s to start a collector.
_LONGEST_WAIT_S = 60
COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main", "collect", "--json", "--no-ingest")


@dataclass
class Collector:
    """A running ``blis-replay collect``."""

    process: subprocess.Popen[str]
    grpc: str
    http: str

    def exporters(self) -> list[SpanExporter]:
        """Two of the SDK's exporters over each transport."""
        return [
            *(GrpcExporter(f"http://{self.grpc}", timeout=_LONGEST_WAIT_S) for _ in range(2)),
            *(HttpExporter(f"http://{self.http}/v1/traces", timeout=_LONGEST_WAIT_S) for _ in range(2)),
        ]

    def end(self) -> tuple[dict[str, Any], str]:
        """The counts it printed after a SIGTERM, and what it said on standard error."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=_LONGEST_WAIT_S)
        assert self.process.returncode == 0
        counts: dict[str, Any] = json.loads(out)["collected"]
        return counts, err


@contextmanager
def collecting(directory: Path, grpc: str = "127.0.0.1:0", http: str = "127.0.0.1:0") -> Iterator[Collector]:
    """A collector process that listens; killed at the end if it still runs."""
    arguments = ("--out", str(directory), "--listen", grpc, "--http", http)
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            where = json.loads(process.stdout.readline())["listening"]
            yield Collector(process, where["grpc"], where["http"])
        finally:
            process.kill()


@dataclass
class Load:
    """Exporters that send batches of spans, each with a number of its own, until told to stop."""

    exporters: list[SpanExporter]
    sent: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=count)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """A thread an exporter."""
        self._threads = [threading.Thread(target=self._send, args=(exporter,)) for exporter in self.exporters]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread finish its batch, retries included."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, acknowledged: int) -> None:
        """Until so many batches are acknowledged."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while len(self.acknowledged) < acknowledged:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _send(self, exporter: SpanExporter) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            self.sent.add(number)
            if exporter.export(batch(number)) is SpanExportResult.SUCCESS:
                self.acknowledged.add(number)


_TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("vllm.scheduler")


def batch(number: int) -> list[ReadableSpan]:
    """Spans as the SDK makes them, which carry the number of their batch."""
    spans = []
    for place in range(SPANS_PER_BATCH):
        one = _TRACER.start_span("llm_core", attributes={"batch": number, "place": place})
        one.end()
        spans.append(one)
    return spans


def batches_on_disk(directory: Path) -> Counter[int]:
    """How often each batch is there; a batch that is there is there with all of its spans."""
    places = Counter(
        tuple(attribute.value.int_value for attribute in one.attributes) for one in stored_spans(directory)
    )
    found = Counter({number: times for (number, place), times in places.items() if place == 0})
    assert places == Counter({(number, p): t for number, t in found.items() for p in range(SPANS_PER_BATCH)})
    return found


@pytest.mark.heavy
def test_a_collector_killed_under_load_has_lost_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    """Killed twice, with a torn frame added to what the first kill left; exporters go on when it is there again."""
    directory = tmp_path / "run"
    with collecting(directory) as first:
        load = Load(first.exporters())
        load.start()
        load.wait_for(acknowledged=50)
        first.process.kill()
        first.process.wait()
    before_kill = set(load.acknowledged)
    assert before_kill <= set(batches_on_disk(directory))
    with segments(directory)[-1].open("ab") as segment:
        segment.write(b"\0\0\1\0torn")
    with collecting(directory, first.grpc, first.http) as second:
        load.wait_for(acknowledged=len(before_kill) + 50)
        second.process.kill()
        _, said = second.process.communicate()
    assert re.search(r"8 bytes at \d+ are not a whole batch: cut off: it was never acknowledged", said)
    with collecting(directory, first.grpc, first.http) as third:
        load.wait_for(acknowledged=len(load.acknowledged) + 20)
        load.stop()
        counts, _ = third.end()
    on_disk = batches_on_disk(directory)
    assert load.acknowledged == load.sent, "exporters tried again until the collector was back"
    assert set(on_disk) == load.sent
    # Only a batch that was under way at a kill can be there twice: four exporters, two kills.
    assert sum(on_disk.values()) - len(on_disk) <= 8
    assert counts["rejected_spans"] == 0


def test_a_signal_under_load_ends_it_cleanly(tmp_path: Path) -> None:
    with collecting(tmp_path) as running:
        load = Load(running.exporters())
        load.start()
        load.wait_for(acknowledged=50)
        stopper = threading.Thread(target=load.stop)
        counts, said = running.end()
        for exporter in load.exporters:
            exporter.shutdown()
        stopper.start()
        stopper.join()
    on_disk = batches_on_disk(tmp_path)
    assert load.acknowledged <= set(on_disk) <= load.sent
    assert counts["spans"] == SPANS_PER_BATCH * sum(on_disk.values())
    assert counts["requests"] == sum(on_disk.values())
    assert said == ""


def test_a_disk_that_fills_up_under_load_loses_nothing(tmp_path: Path) -> None:
    """No file may grow for a while, as on a full disk; exporters try again, and everything arrives."""
    with collecting(tmp_path) as running:
        load = Load(running.exporters())
        load.start()
        load.wait_for(acknowledged=20)
        unlimited = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        assert running.process.stderr
        complaint = running.process.stderr.readline()
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, unlimited)
        load.wait_for(acknowledged=len(load.acknowledged) + 20)
        load.stop()
        counts, recovery = running.end()
    assert "cannot be written (File too large); nothing of it is acknowledged" in complaint
    assert recovery == f"{tmp_path}: written again\n"
    assert load.acknowledged == load.sent
    assert batches_on_disk(tmp_path) == Counter(dict.fromkeys(load.sent, 1))
    assert counts["refused_requests"] >= 1


@pytest.mark.parametrize("other", ["--out", "--listen"])
def test_a_second_collector_is_refused_in_one_line(tmp_path: Path, other: str) -> None:
    with collecting(tmp_path / "run") as running:
        places = {"--out": str(tmp_path / "free"), "--listen": "127.0.0.1:0", "--http": "127.0.0.1:0"}
        places[other] = {"--out": str(tmp_path / "run"), "--listen": running.grpc}[other]
        arguments = [part for option in places.items() for part in option]
        ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=20)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(f"error: {places[other]}: ")
