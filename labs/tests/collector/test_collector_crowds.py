"""More than the collector takes at once, and clients that keep it waiting: who is asked to come again, and when."""

from __future__ import annotations

import gzip
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import requests
from collecting import (
    PROTOBUF,
    SOUND,
    asks_for_a_retry,
    call,
    collector,
    is_called,
    post,
    raw,
    request,
    span,
    status_of_post,
    stored_messages,
    until,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from blis_replay_labs.collector import segments as segment_writer
from blis_replay_labs.collector.collector import SERVICE
from blis_replay_labs.collector.limits import LARGE_BYTES, MAX_CHANNELS, MAX_CONNECTIONS, MAX_LARGE, room_for


def test_a_full_queue_asks_to_try_again_and_takes_it_then(tmp_path: Path, held_disk: threading.Event) -> None:
    """OTLP: RESOURCE_EXHAUSTED is tried again only with RetryInfo, 503 after Retry-After."""
    with collector(tmp_path, queue_bytes=len(SOUND)) as running, ThreadPoolExecutor() as clients:
        held_disk.clear()
        waiting = clients.submit(call, running, SOUND)
        until(lambda: _written(tmp_path) > 0)
        over_http = post(running, SOUND)
        with pytest.raises(grpc.RpcError) as over_grpc:
            call(running, SOUND)
        held_disk.set()
        assert waiting.result(10) == ExportTraceServiceResponse()
        assert post(running, SOUND).status_code == 200
    assert (over_http.status_code, over_http.headers["Retry-After"]) == (503, "1")
    assert over_grpc.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    asks_for_a_retry(over_grpc.value)
    assert (running.counts.requests, running.counts.refused_requests) == (2, 2)


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


def test_more_calls_than_are_taken_are_asked_to_come_again(tmp_path: Path, held_disk: threading.Event) -> None:
    """64 calls wait for a disk that is held up; the one that is too many, over another connection, is told so."""
    with collector(tmp_path) as running, ExitStack() as channels:
        held_disk.clear()
        calls = []
        for number, count in enumerate((MAX_CONNECTIONS - 1, 2)):
            options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
            channel = channels.enter_context(grpc.insecure_channel(str(running.listening.grpc), options))
            calls += [channel.unary_unary(f"/{SERVICE}/Export").future(SOUND, timeout=20) for _ in range(count)]
        until(lambda: any(one.done() for one in calls))
        held_disk.set()
        errors = [one.exception() for one in calls]
    (refused,) = [error for error in errors if error is not None]
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    asks_for_a_retry(refused)
    assert len(stored_messages(tmp_path)) == MAX_CONNECTIONS


@pytest.mark.slow
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
    asks_for_a_retry(over_grpc.value)
    assert stored_messages(tmp_path) == [SOUND, large]
    assert running.counts.refused_requests == 3


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
        until(lambda: status_of_post(running) == 200)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer


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
        until(lambda: is_called(running))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


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


def test_idle_connections_of_http_lock_no_exporter_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 connections, as many as are taken, send nothing, or half of a request; the first of them makes room."""
    monkeypatch.setattr("blis_replay_labs.collector.http_service.GRACE_SECONDS", 0.2)
    with collector(tmp_path) as running:
        held = [raw(running)]
        time.sleep(0.2)  # its thread waits before those of the others
        held.extend(raw(running) for _ in range(MAX_CONNECTIONS - 1))
        for connection in held[1:]:
            connection.sendall(b"POST /v1/traces HTTP/1.1\r\n")
        time.sleep(0.5)
        assert post(running, SOUND).status_code == 200
        assert held[0].recv(1000) == b"", "hung up"
        for connection in held:
            connection.close()
    assert stored_messages(tmp_path) == [SOUND]


def test_calls_that_send_nothing_lock_no_exporter_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 calls, as many as are taken, bring no message; who waits longest makes room and is told to come again."""
    monkeypatch.setattr("blis_replay_labs.collector.collector.GRACE_SECONDS", 0.2)
    of_its_own = [("grpc.use_local_subchannel_pool", 1)]
    with collector(tmp_path) as running, grpc.insecure_channel(str(running.listening.grpc), of_its_own) as channel:
        never = threading.Event()
        export = channel.stream_unary(f"/{SERVICE}/Export")
        silent = [export.future(iter(lambda: never.wait(20), True), timeout=20) for _ in range(MAX_CONNECTIONS)]
        time.sleep(0.5)
        call(running, SOUND)
        until(lambda: any(one.done() for one in silent))
        given_up = next(one.exception() for one in silent if one.done())
        never.set()
    assert given_up.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    asks_for_a_retry(given_up)
    assert stored_messages(tmp_path) == [SOUND]
    assert running.counts.refused_requests >= 1


def test_idle_connections_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with requests.Session() as session:
        with collector(tmp_path) as running:
            session.post(running.http, SOUND, headers={"Content-Type": PROTOBUF}, timeout=10)
            idle = raw(running)
            begin = time.monotonic()
        assert time.monotonic() - begin < 3
        idle.close()
    assert stored_messages(tmp_path) == [SOUND]
