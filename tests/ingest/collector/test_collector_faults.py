"""What a client can do wrong, and what the collector does about it: an answer, a count, and life goes on."""

from __future__ import annotations

import asyncio
import base64
import errno
import gzip
import json
import os
import random
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from collecting import ANY_PORT, Running, collector, request, span, stored_messages, stored_spans
from google.protobuf.json_format import MessageToDict
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from blis_replay.ingest.collector import segments as segment_writer
from blis_replay.ingest.collector.collector import SERVICE, CollectorSettings, collect
from blis_replay.ingest.collector.limits import LARGE_BYTES, MAX_CHANNELS, MAX_CONNECTIONS, MAX_LARGE, Access, room_for
from blis_replay.ingest.errors import CollectorError

SOUND = request(span(0)).SerializeToString()
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def post(running: Running, body: bytes, content_type: str = PROTOBUF, **headers: str) -> requests.Response:
    """One request on a connection of its own."""
    sent = {"Content-Type": content_type} | {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(running.http, body, headers=sent, timeout=10)


def call(running: Running, message: bytes, seconds: float = 10, **options: Any) -> ExportTraceServiceResponse:
    """One call on a channel of its own; raises ``grpc.RpcError``."""
    with grpc.insecure_channel(str(running.listening.grpc), **options) as channel:
        export = channel.unary_unary(f"/{SERVICE}/Export")
        return ExportTraceServiceResponse.FromString(export(message, timeout=seconds))


def raw(running: Running) -> socket.socket:
    """A connection to the HTTP port."""
    where = running.listening.http
    return socket.create_connection((where.host, where.port), timeout=10)


def test_partial_success_says_how_many_and_why_over_every_transport(tmp_path: Path) -> None:
    mixed = request(span(0), span(1, trace_id=b"short"), span(2))
    said = "1 of 3 spans; span 2 of scope 'vllm.scheduler': trace_id of 5 bytes instead of 16"
    with collector(tmp_path) as running:
        over_grpc = call(running, mixed.SerializeToString()).partial_success
        over_http = ExportTraceServiceResponse.FromString(post(running, mixed.SerializeToString()).content)
        as_json = post(running, _otlp_json(mixed), JSON)
    assert (over_grpc.rejected_spans, over_grpc.error_message) == (1, said)
    assert over_http.partial_success == over_grpc
    assert as_json.headers["Content-Type"] == JSON
    assert as_json.json() == {"partialSuccess": {"rejectedSpans": "1", "errorMessage": said}}
    assert [one.span_id[-1] for one in stored_spans(tmp_path)] == [1, 3] * 3
    assert (running.counts.spans, running.counts.rejected_spans) == (6, 3)
    assert len(running.said) == 1, "one line for the operator, then counts"


def _otlp_json(message: Any) -> bytes:
    document = MessageToDict(message)
    for one in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for key in ("traceId", "spanId"):
            one[key] = base64.b64decode(one[key]).hex()
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"no protobuf", {}),
        (400, b"{", {"content_type": JSON}),
        (400, b"no gzip", {"Content_Encoding": "gzip"}),
        (400, gzip.compress(SOUND, mtime=0)[:-4], {"Content_Encoding": "gzip"}),
        (400, gzip.compress(SOUND, mtime=0) + b"more", {"Content_Encoding": "gzip"}),
        (413, gzip.compress(bytes((4 << 20) + 1), mtime=0), {"Content_Encoding": "gzip"}),
        (413, bytes((4 << 20) + 1), {}),
        (415, SOUND, {"content_type": "text/plain"}),
        (415, SOUND, {"Content_Encoding": "br"}),
        (411, SOUND, {"Transfer_Encoding": "chunked"}),
        (431, SOUND, {"X": "x" * 40_000}),
    ],
)
def test_http_requests_that_are_refused_for_good(
    status: int, body: bytes, headers: dict[str, str], tmp_path: Path
) -> None:
    with collector(tmp_path) as running:
        assert post(running, body, **headers).status_code == status
        assert post(running, SOUND).status_code == 200
    assert stored_messages(tmp_path) == [SOUND]
    assert running.counts.malformed_requests == (status in (400, 413))


def test_other_paths_and_methods_are_refused(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        assert requests.post(running.http.replace("traces", "metrics"), SOUND, timeout=10).status_code == 404
        assert requests.get(running.http, timeout=10).status_code == 501
    assert stored_messages(tmp_path) == []


def test_grpc_messages_that_are_refused_for_good(tmp_path: Path) -> None:
    """The limit is gRPC's own of 4 MB, and holds for what a compressed message expands to."""
    refused = []
    with collector(tmp_path) as running:
        for message, compression in (
            (b"no protobuf", grpc.Compression.NoCompression),
            (bytes((4 << 20) + 1), grpc.Compression.NoCompression),
            (bytes((4 << 20) + 1), grpc.Compression.Gzip),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(running, message, compression=compression)
            refused.append(error.value.code().name)
        call(running, SOUND)
    assert refused == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    assert stored_messages(tmp_path) == [SOUND]
    assert running.counts.malformed_requests == 3


def test_larger_messages_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    large = request(*(span(number, name="n" * (5 << 19)) for number in range(2))).SerializeToString()
    refused, taken = tmp_path / "refused", tmp_path / "taken"
    with collector(refused) as running:
        assert post(running, large).status_code == 413
    assert "larger than the 4 MB" in running.said[0]
    assert "--max-message 16" in running.said[0]
    with collector(taken, message_bytes=6 << 20) as running:
        call(running, large)
        assert post(running, large).status_code == 200
        assert post(running, bytes((6 << 20) + 1)).status_code == 413
    assert stored_messages(taken) == [large, large]


def test_a_full_queue_asks_to_try_again_and_takes_it_then(tmp_path: Path, held_disk: threading.Event) -> None:
    """OTLP: RESOURCE_EXHAUSTED is tried again only with RetryInfo, 503 after Retry-After."""
    with collector(tmp_path, queue_bytes=len(SOUND)) as running, ThreadPoolExecutor() as clients:
        held_disk.clear()
        waiting = clients.submit(call, running, SOUND)
        _until(lambda: _written(tmp_path) > 0)
        over_http = post(running, SOUND)
        with pytest.raises(grpc.RpcError) as over_grpc:
            call(running, SOUND)
        held_disk.set()
        assert waiting.result(10) == ExportTraceServiceResponse()
        assert post(running, SOUND).status_code == 200
    assert (over_http.status_code, over_http.headers["Retry-After"]) == (503, "1")
    assert over_grpc.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    _asks_for_a_retry(over_grpc.value)
    assert (running.counts.requests, running.counts.refused_requests) == (2, 2)


def test_a_full_disk_is_answered_with_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with collector(tmp_path) as running:
        with monkeypatch.context() as patch:
            patch.setattr(segment_writer, "_sync", full)
            with pytest.raises(grpc.RpcError) as over_grpc:
                call(running, SOUND)
            over_http = post(running, SOUND)
        call(running, SOUND)
    assert over_grpc.value.code() == grpc.StatusCode.UNAVAILABLE
    _asks_for_a_retry(over_grpc.value)
    assert (over_http.status_code, over_http.headers["Retry-After"]) == (503, "1")
    assert Status.FromString(over_http.content).message.endswith("No space left on device")
    assert stored_messages(tmp_path) == [SOUND]
    assert len(running.said) == 2, "that it began, and that it is over"


def _asks_for_a_retry(error: Any) -> None:
    metadata = dict(error.trailing_metadata())
    status = Status.FromString(metadata["grpc-status-details-bin"])
    told = RetryInfo()
    assert status.details[0].Unpack(told)
    assert told.retry_delay.seconds == 1
    assert RetryInfo.FromString(metadata["google.rpc.retryinfo-bin"]) == told


def test_a_slow_client_is_given_up_and_holds_nobody_up(tmp_path: Path) -> None:
    """Neither a byte now and then nor silence keeps a connection; 0.5 s are allowed here."""
    head = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 1000\r\n"
    with collector(tmp_path, read_seconds=0.5) as running:
        with raw(running) as silent, raw(running) as in_headers, raw(running) as in_body:
            in_headers.sendall(head)
            in_body.sendall(head + b"\r\n")
            begin = time.monotonic()
            assert call(running, SOUND) == ExportTraceServiceResponse()
            answers = [connection.recv(1000) for connection in (silent, in_headers, in_body)]
            assert 0.3 < time.monotonic() - begin < 5
        with grpc.insecure_channel(str(running.listening.grpc)) as channel:
            never = threading.Event()
            export = channel.stream_unary(f"/{SERVICE}/Export")
            with pytest.raises(grpc.RpcError) as given_up:
                export(iter(lambda: never.wait(10), True), timeout=10)
            never.set()
    assert answers[0] == b""
    assert answers[2].startswith(b"HTTP/1.1 408 ")
    assert given_up.value.details() == "no message within 0.5 s"
    assert stored_messages(tmp_path) == [SOUND]


def test_connections_are_bounded_and_free_again(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        held = [raw(running) for _ in range(MAX_CONNECTIONS)]
        with raw(running) as one_more:
            answer = one_more.recv(1000)
        for connection in held:
            connection.close()
        _until(lambda: _status(running) == 200)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer


def _status(running: Running) -> int:
    try:
        return post(running, SOUND).status_code
    except requests.ConnectionError:
        return 0


def test_more_calls_than_are_taken_are_asked_to_come_again(tmp_path: Path, held_disk: threading.Event) -> None:
    """64 calls wait for a disk that is held up; the one that is too many, over another connection, is told so."""
    with collector(tmp_path) as running, ExitStack() as channels:
        held_disk.clear()
        calls = []
        for number, count in enumerate((MAX_CONNECTIONS - 1, 2)):
            options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
            channel = channels.enter_context(grpc.insecure_channel(str(running.listening.grpc), options))
            calls += [channel.unary_unary(f"/{SERVICE}/Export").future(SOUND, timeout=20) for _ in range(count)]
        _until(lambda: any(one.done() for one in calls))
        held_disk.set()
        errors = [one.exception() for one in calls]
    (refused,) = [error for error in errors if error is not None]
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    _asks_for_a_retry(refused)
    assert len(stored_messages(tmp_path)) == MAX_CONNECTIONS


def test_idle_connections_lock_no_exporter_out(tmp_path: Path) -> None:
    """100 that send nothing, more than there may be calls: each takes a connection of gRPC, and none of its calls."""
    with collector(tmp_path) as running:
        where = running.listening.grpc
        held = [socket.create_connection((where.host, where.port), timeout=10) for _ in range(100)]
        for connection in held:
            assert connection.recv(1)
        call(running, SOUND)
        for connection in held:
            connection.close()
    assert stored_messages(tmp_path) == [SOUND]


def test_only_so_many_large_messages_are_in_memory_at_once(tmp_path: Path) -> None:
    """While there are four of more than 2 MB, a fifth is asked to come again, over HTTP before its body is kept."""
    large = request(span(1, name="n" * (3 << 20))).SerializeToString()
    packed = gzip.compress(large)
    with collector(tmp_path) as running:
        with ExitStack() as room:
            for _ in range(MAX_LARGE):
                room.enter_context(room_for(LARGE_BYTES + 1))
            refused = [post(running, large), post(running, packed, Content_Encoding="gzip")]
            with pytest.raises(grpc.RpcError) as over_grpc:
                call(running, large)
            assert post(running, SOUND).status_code == 200
        assert post(running, packed, Content_Encoding="gzip").status_code == 200
    assert [(one.status_code, one.headers["Retry-After"]) for one in refused] == [(503, "1")] * 2
    _asks_for_a_retry(over_grpc.value)
    assert stored_messages(tmp_path) == [SOUND, large]
    assert running.counts.refused_requests == 3


def test_calls_that_send_nothing_lock_no_exporter_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 calls, as many as are taken, bring no message; who waits longest makes room and is told to come again."""
    monkeypatch.setattr("blis_replay.ingest.collector.collector.GRACE_SECONDS", 0.2)
    of_its_own = [("grpc.use_local_subchannel_pool", 1)]
    with collector(tmp_path) as running, grpc.insecure_channel(str(running.listening.grpc), of_its_own) as channel:
        never = threading.Event()
        export = channel.stream_unary(f"/{SERVICE}/Export")
        silent = [export.future(iter(lambda: never.wait(20), True), timeout=20) for _ in range(MAX_CONNECTIONS)]
        time.sleep(0.5)
        call(running, SOUND)
        _until(lambda: any(one.done() for one in silent))
        given_up = next(one.exception() for one in silent if one.done())
        never.set()
    assert given_up.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    _asks_for_a_retry(given_up)
    assert stored_messages(tmp_path) == [SOUND]
    assert running.counts.refused_requests >= 1


def test_idle_connections_of_http_lock_no_exporter_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 connections, as many as are taken, send nothing, or half of a request; the first of them makes room."""
    monkeypatch.setattr("blis_replay.ingest.collector.http_service.GRACE_SECONDS", 0.2)
    with collector(tmp_path) as running:
        held = [raw(running) for _ in range(MAX_CONNECTIONS)]
        for connection in held[1:]:
            connection.sendall(b"POST /v1/traces HTTP/1.1\r\n")
        time.sleep(0.5)
        assert post(running, SOUND).status_code == 200
        assert held[0].recv(1000) == b"", "hung up"
        for connection in held:
            connection.close()
    assert stored_messages(tmp_path) == [SOUND]


def test_grpc_connections_are_bounded(tmp_path: Path) -> None:
    """gRPC hangs up on those that are too many; to an exporter the collector is unavailable, and it tries again."""
    with collector(tmp_path) as running:
        where = running.listening.grpc
        held = [socket.create_connection((where.host, where.port), timeout=10) for _ in range(MAX_CHANNELS)]
        for connection in held:
            assert connection.recv(1)  # its SETTINGS frame: the connection is one of the 512
        with pytest.raises(grpc.RpcError) as refused:
            call(running, SOUND)
        for connection in held:
            connection.close()
        _until(lambda: _called(running))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("header", "taken"), [("", False), ("Bearer no", False), ("Bearer s3cret", True)])
def test_who_has_no_token_sends_nothing(tmp_path: Path, header: str, taken: bool) -> None:
    with collector(tmp_path, access=Access(token="s3cret")) as running:  # noqa: S106 - a test's own
        headers = {"Content-Type": "application/x-protobuf", "Authorization": header}
        status = requests.post(running.http, SOUND, headers=headers, timeout=10).status_code
        with grpc.insecure_channel(str(running.listening.grpc)) as channel:
            one = channel.unary_unary(f"/{SERVICE}/Export").future(
                SOUND, timeout=10, metadata=[("authorization", header)]
            )
            code = one.code()
    assert (status, code) == ((200, grpc.StatusCode.OK) if taken else (401, grpc.StatusCode.UNAUTHENTICATED))
    assert stored_messages(tmp_path) == [SOUND, SOUND] * taken
    assert running.counts.malformed_requests == (0 if taken else 2)


def test_what_arrives_is_encrypted_where_it_is_asked_for(tmp_path: Path) -> None:
    """Over both transports, with a certificate that its client trusts; without encryption nobody is heard."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl is not here to make a certificate")
    with collector(tmp_path / "run", access=Access(certificate, key)) as running:
        headers = {"Content-Type": "application/x-protobuf"}
        url = running.http.replace("http:", "https:")
        assert requests.post(url, SOUND, headers=headers, verify=str(certificate), timeout=10).status_code == 200
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(str(running.listening.grpc), trusted) as channel:
            channel.unary_unary(f"/{SERVICE}/Export")(SOUND, timeout=10)
        with pytest.raises(requests.ConnectionError):
            requests.post(running.http, SOUND, headers=headers, timeout=10)
        with pytest.raises(grpc.RpcError):
            call(running, SOUND)
    assert stored_messages(tmp_path / "run") == [SOUND, SOUND]


def _called(running: Running) -> bool:
    try:
        call(running, SOUND)
    except grpc.RpcError:
        return False
    return True


def test_random_bytes_on_either_port_leave_it_alive(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Noise alone and noise after a good beginning, 300 connections of it."""
    noise = random.Random(0)  # noqa: S311 - repeatable, not secret
    beginnings = (
        b"",
        b"POST /v1/traces HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\nContent-Length: 7\r\n\r\n",
    )
    with collector(tmp_path) as running:
        for number in range(300):
            where = running.listening.grpc if number % 3 == 0 else running.listening.http
            with socket.create_connection((where.host, where.port), timeout=10) as connection, suppress(OSError):
                connection.sendall(noise.choice(beginnings) + noise.choice(beginnings) + noise.randbytes(50))
        _until(lambda: _called(running) and _status(running) == 200)
    assert set(stored_messages(tmp_path)) == {SOUND}
    assert "Traceback" not in capfd.readouterr().err


def test_a_batch_that_is_sent_twice_is_there_twice(tmp_path: Path) -> None:
    """An exporter whose acknowledgement was lost sends again; ingest tells by the span ids that it is the same."""
    with collector(tmp_path) as running:
        call(running, SOUND)
        post(running, SOUND)
    assert stored_messages(tmp_path) == [SOUND, SOUND]


def test_idle_connections_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with requests.Session() as session:
        with collector(tmp_path) as running:
            session.post(running.http, SOUND, headers={"Content-Type": PROTOBUF}, timeout=10)
            idle = raw(running)
            begin = time.monotonic()
        assert time.monotonic() - begin < 3
        idle.close()
    assert stored_messages(tmp_path) == [SOUND]


def test_an_address_or_directory_in_use_is_one_line(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        free, taken_grpc, taken_http = tmp_path / "free", running.listening.grpc, running.listening.http
        for settings, complaint in (
            (CollectorSettings(tmp_path, ANY_PORT, ANY_PORT), "another collector writes here"),
            (CollectorSettings(free, taken_grpc, ANY_PORT), f"{taken_grpc}: cannot listen there for gRPC"),
            (CollectorSettings(free, ANY_PORT, taken_http), f"{taken_http}: cannot listen there for HTTP"),
        ):
            with pytest.raises(CollectorError, match=complaint):
                asyncio.run(collect(settings, asyncio.Event(), print, print))


@pytest.fixture
def held_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk whose sync waits while the event is clear."""
    may_sync = threading.Event()
    may_sync.set()

    def sync(handle: int) -> None:
        assert may_sync.wait(20)
        os.fsync(handle)

    monkeypatch.setattr(segment_writer, "_sync", sync)
    return may_sync


def _written(directory: Path) -> int:
    """What has been written so far, durable or not."""
    return sum(path.stat().st_size for path in directory.iterdir())


def _until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
