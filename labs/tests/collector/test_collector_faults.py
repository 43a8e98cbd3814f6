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
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from collecting import (
    ANY_PORT,
    SOUND,
    asks_for_a_retry,
    call,
    collector,
    is_called,
    post,
    request,
    span,
    status_of_post,
    stored_messages,
    stored_spans,
    until,
)
from google.protobuf.json_format import MessageToDict
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from blis_replay_labs.collector import segments as segment_writer
from blis_replay_labs.collector.collector import SERVICE, CollectorSettings, collect
from blis_replay_labs.collector.limits import Access, CollectorError

JSON = "application/json"


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
    asks_for_a_retry(over_grpc.value)
    assert (over_http.status_code, over_http.headers["Retry-After"]) == (503, "1")
    assert Status.FromString(over_http.content).message.endswith("No space left on device")
    assert stored_messages(tmp_path) == [SOUND]
    assert len(running.said) == 2, "that it began, and that it is over"


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


@pytest.mark.slow
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
        until(lambda: is_called(running) and status_of_post(running) == 200)
    assert set(stored_messages(tmp_path)) == {SOUND}
    assert "Traceback" not in capfd.readouterr().err


def test_a_batch_that_is_sent_twice_is_there_twice(tmp_path: Path) -> None:
    """An exporter whose acknowledgement was lost sends again; ingest tells by the span ids that it is the same."""
    with collector(tmp_path) as running:
        call(running, SOUND)
        post(running, SOUND)
    assert stored_messages(tmp_path) == [SOUND, SOUND]


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
