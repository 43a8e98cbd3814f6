"""``blis-replay collect``: what it prints, and what it leaves in the store."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from command_line import Run
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.store import open_store, read_stored

COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main", "collect", "--http", "127.0.0.1:0")


@pytest.mark.slow
def test_spans_of_a_run_are_collected_and_its_directory_is_ingested(demo: Path, tmp_path: Path) -> None:
    """The directory of the demo has a load generator's results of 300 requests; the collector adds the traces."""
    arguments = ("--out", str(demo), "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store.duckdb"))
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        first = process.stdout.readline()
        where = re.match(r"listening on (127\.0\.0\.1:\d+) \(gRPC\) and 127\.0\.0\.1:\d+ \(HTTP\); writing to ", first)
        assert where
        provider = TracerProvider(resource=Resource({"service.name": "vllm"}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"http://{where[1]}")))
        with provider.get_tracer("test").start_as_current_span("a span") as one:
            for number in range(130):  # the SDK keeps 128
                one.add_event(str(number))
        provider.shutdown()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("1 span in 1 request, ")
    assert re.search(r"^vllm +1 +2 +0 +0$", out, re.MULTILINE)
    assert "new; 300 requests" in out
    assert len(list(demo.glob("traces-*.pb"))) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "localhost:4317", ":4317", "::1:"])
def test_what_is_no_address_is_wrong_use(run: Run, address: str) -> None:
    answer = run("collect", "--out", "run", "--listen", address)
    assert answer.code == 2
    assert "write e.g. 127.0.0.1:4317" in answer.err
    assert not Path("run").exists()


def test_a_directory_that_cannot_be_made_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = run("collect", "--out", tmp_path / "file" / "run", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert (answer.code, answer.out) == (3, "")
    assert len(answer.err.splitlines()) == 1
    assert "choose another --out" in answer.err


def test_other_machines_are_warned_of(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = run("collect", "--out", tmp_path / "file" / "run", "--listen", "0.0.0.0:0", "--http", "[::1]:0")
    assert "warning: 0.0.0.0 is open to other machines" in answer.err
    assert "::1 is open" not in answer.err


def test_what_a_real_server_exported_is_in_the_store_as_from_its_file(data_pack: Path, tmp_path: Path) -> None:
    """The messages of a recorded run, sent again, every third one twice: steps and journeys are those of the file."""
    recorded, direct, live = data_pack / "vllm-traces" / "fcfs-async", tmp_path / "direct", tmp_path / "live"
    for folder in (direct, live):
        folder.mkdir()
        (folder / "exp-config.yaml").write_bytes((recorded / "exp-config.yaml").read_bytes())
    (direct / "traces.json.zst").write_bytes((recorded / "traces.json.zst").read_bytes())
    arguments = ("--out", str(live), "--listen", "127.0.0.1:0", "--store", str(tmp_path / "store.duckdb"))
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        where = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
        assert where
        with grpc.insecure_channel(where[0]) as channel:
            for number, message in enumerate(frames((recorded / "traces.pb").read_bytes())):
                for _ in range(2 if number % 3 == 0 else 1):
                    TraceServiceStub(channel).Export(ExportTraceServiceRequest.FromString(message))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "new; 495 requests, 464 steps" in out
    with open_store(tmp_path / "store.duckdb") as store, read_recording(direct) as expected:
        stored = read_stored(store, "live")
        assert stored.steps.frame().equals(expected.steps.frame())
        assert stored.lifecycles.frame().equals(expected.lifecycles.frame())
        assert stored.requests.frame().equals(expected.requests.frame())


def frames(content: bytes) -> Iterator[bytes]:
    """Messages behind their lengths of 4 bytes."""
    while content:
        length = int.from_bytes(content[:4], "big")
        yield content[4 : 4 + length]
        content = content[4 + length :]
