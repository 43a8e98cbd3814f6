"""Segments on disk: framing, names, torn tails, one collector a directory."""

from __future__ import annotations

import errno
import os
import re
import zlib
from pathlib import Path

import pytest
from collecting import request, span, stored_messages
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay_labs.collector.frames import frame_spans, framed
from blis_replay_labs.collector.limits import CollectorError
from blis_replay_labs.collector.segments import (
    CORRECTED,
    CUT_OFF,
    Damage,
    claimed,
    new_segment,
    next_number,
    recover,
    segments,
)

NAME = "traces-20260218T150304Z-1.pb"


def frames(*messages: bytes) -> bytes:
    return b"".join(map(framed, messages))


def test_a_frame_is_a_big_endian_length_the_message_and_its_checksum() -> None:
    """As the OpenTelemetry Collector's file exporter (``format: proto``); 0x352441c2 is the CRC-32 of ``abc``."""
    assert framed(b"abc") == b"\0\0\0\x0cabc" + b"\xfd\xff\xff\xff\x0f" + bytes.fromhex("c2412435")


def test_readers_of_protobuf_pass_the_checksum_over() -> None:
    message = request(span(1), span(2))
    content = framed(message.SerializeToString())[4:]
    read = ExportTraceServiceRequest.FromString(content)
    assert list(read.resource_spans) == list(message.resource_spans)


def test_names_tell_when_and_in_which_order(tmp_path: Path) -> None:
    path = new_segment(tmp_path, 12)
    assert re.fullmatch(r"traces-\d{8}T\d{6}Z-12\.pb", path.name)
    for name in (NAME, "traces-20260218T150304Z-10.pb", "traces-20260218T150304Z-9.pb", "traces.pb", "traces.json"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name[-5:] for path in segments(tmp_path)] == ["-1.pb", "-9.pb", "10.pb"]
    assert next_number(tmp_path) == 11


@given(messages=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), tail=st.binary(max_size=30))
def test_whatever_follows_the_last_whole_frame_is_cut(
    tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], tail: bytes
) -> None:
    """Cut at every place that a kill can leave: inside a length, inside a message."""
    torn = framed(b"x" * (len(tail) + 1))[: len(tail)]
    directory = tmp_path_factory.mktemp("segments")
    path = directory / NAME
    path.write_bytes(frames(*messages) + torn)
    cut = recover(directory)
    assert stored_messages(directory) == messages
    assert cut == ((Damage(NAME, len(frames(*messages)), len(torn), CUT_OFF),) if torn else ())
    assert recover(directory) == ()


@given(flipped=st.integers(0, 8 * 3 * (4 + 5 + 9) - 1), is_last=st.booleans())
def test_one_flipped_bit_costs_no_acknowledged_batch(
    tmp_path_factory: pytest.TempPathFactory, flipped: int, is_last: bool
) -> None:
    """In three frames of 18 bytes: all messages that are sound stay, and the others lie beside, byte by byte."""
    directory = tmp_path_factory.mktemp("segments")
    messages = [b"first", b"secnd", b"third"]
    content = bytearray(frames(*messages))
    content[flipped // 8] ^= 1 << flipped % 8
    (directory / NAME).write_bytes(content)
    if not is_last:
        (directory / "traces-20260218T150304Z-2.pb").write_bytes(framed(b"last"))
    (damage,) = recover(directory)
    hit, byte = divmod(flipped // 8, 18)
    others = [message for place, message in enumerate(messages) if place != hit]
    stored = stored_messages(directory)[: len(messages)]
    if byte < 4:  # the length: it is known from where the frame ends
        assert (damage.done, stored) == (CORRECTED, messages)
    else:
        assert stored[: len(others)] == others
        aside = directory / f"{NAME}.damaged-{18 * hit}"
        assert damage == Damage(NAME, 18 * hit, 18, f"set aside in {aside.name}: it may have been acknowledged")
        assert aside.read_bytes() == content[18 * hit : 18 * hit + 18]
    assert recover(directory) == ()


def test_only_the_last_segment_is_cut(tmp_path: Path) -> None:
    """The collector begins a new one when all of the last is on disk, so there a tail is damage."""
    (tmp_path / NAME).write_bytes(framed(b"abc") + framed(b"lost")[:9])
    (tmp_path / "traces-20260218T150304Z-2.pb").write_bytes(framed(b"next"))
    (damage,) = recover(tmp_path)
    assert damage.done.startswith("set aside in traces-20260218T150304Z-1.pb.damaged-16")
    assert stored_messages(tmp_path) == [b"abc", b"next"]


def test_frames_without_checksums_are_taken_and_never_cut(tmp_path: Path) -> None:
    """Those of the OpenTelemetry Collector, and of this one before it had checksums."""
    plain = b"\0\0\0\3abc\0\0\0\2de"
    (tmp_path / NAME).write_bytes(plain + b"\0\0\1\0torn")
    assert recover(tmp_path)[0].done.startswith("set aside")
    assert stored_messages(tmp_path) == [b"abc", b"de"]
    assert (tmp_path / f"{NAME}.damaged-13").read_bytes() == b"\0\0\1\0torn"


def test_zeros_that_a_crash_of_the_machine_left_are_no_messages(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(framed(b"abc") + bytes(4096))
    assert recover(tmp_path) == (Damage(NAME, 16, 4096, CUT_OFF),)
    assert list(frame_spans(tmp_path / NAME)) == [(4, 3)]


def test_a_tail_longer_than_a_message_is_no_torn_one(tmp_path: Path) -> None:
    """16 MB is the largest message; a length that points beyond the file so far from its end is damage."""
    (tmp_path / NAME).write_bytes(framed(b"abc") + b"\xff\xff\xff\xff" + bytes(17 << 20))
    assert recover(tmp_path)[0].done.startswith("set aside")
    assert (tmp_path / f"{NAME}.damaged-16").stat().st_size == 4 + (17 << 20)


def test_a_frame_whose_end_is_there_is_no_torn_one(tmp_path: Path) -> None:
    """A damaged sector over the length and the message of the last batch: its checksum says that it was written."""
    last = bytearray(framed(b"acknowledged"))
    last[1:9] = b"\x01garbage"
    (tmp_path / NAME).write_bytes(framed(b"abc") + last)
    (damage,) = recover(tmp_path)
    assert damage.done == f"set aside in {NAME}.damaged-16: it may have been acknowledged"
    assert (tmp_path / f"{NAME}.damaged-16").read_bytes() == last


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    """Two batches, of 18 bytes each, are damaged one after the other at the same place: the second has moved there."""
    messages = [b"first", b"secnd", b"third"]
    (tmp_path / NAME).write_bytes(frames(*messages))
    asides = []
    for left in (2, 1):
        content = bytearray((tmp_path / NAME).read_bytes())
        content[4] ^= 1
        (tmp_path / NAME).write_bytes(content)
        (damage,) = recover(tmp_path)
        asides.append(damage.done.split()[3].rstrip(":"))
        assert len(stored_messages(tmp_path)) == left
    assert asides == [f"{NAME}.damaged-0", f"{NAME}.damaged-0-2"]
    kept = [(tmp_path / name).read_bytes()[5:9] for name in asides]
    assert kept == [b"irst", b"ecnd"]


def test_damage_that_was_set_aside_before_a_kill_is_not_set_aside_twice(tmp_path: Path) -> None:
    content = bytearray(frames(b"first", b"secnd"))
    content[4] ^= 1
    for _killed_before_it_was_mended in range(2):
        (tmp_path / NAME).write_bytes(content)
        recover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, f"{NAME}.damaged-0"}


def test_what_a_link_points_to_is_not_mended(tmp_path: Path) -> None:
    """Whoever may write the directory would have another file cut, or replaced."""
    others, directory = tmp_path / "others.pb", tmp_path / "spans"
    others.write_bytes(framed(b"abc") + framed(b"torn")[:9])
    directory.mkdir()
    (directory / NAME).symlink_to(others)
    os.mkfifo(directory / "traces-20260218T150304Z-2.pb")
    (directory / "traces-20260218T150304Z-3.pb").mkdir()
    damage = [(found.name[-4:], found.done) for found in recover(directory)]
    assert damage == [(f"{number}.pb", "left as it is: it is a link, a pipe or a folder") for number in (1, 2, 3)]
    assert others.read_bytes() == framed(b"abc") + framed(b"torn")[:9]
    assert next_number(directory) == 4


@pytest.mark.parametrize("planted", ["link", "pipe", "folder"])
def test_nothing_planted_takes_what_is_set_aside(tmp_path: Path, planted: str) -> None:
    directory, aside = tmp_path / "spans", tmp_path / "spans" / f"{NAME}.damaged-16"
    directory.mkdir()
    (tmp_path / "victim").write_text("as it was")
    {"link": lambda: aside.symlink_to(tmp_path / "victim"), "pipe": lambda: os.mkfifo(aside), "folder": aside.mkdir}[
        planted
    ]()
    damaged = framed(b"def")[:-1] + b"!"
    (directory / NAME).write_bytes(framed(b"abc") + damaged)
    (damage,) = recover(directory)
    assert f"{aside.name}-2" in damage.done
    assert (directory / f"{aside.name}-2").read_bytes() == damaged
    assert (tmp_path / "victim").read_text() == "as it was"


def test_a_segment_that_cannot_be_mended_is_left_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the collector starts all the same, and mends it the next time."""
    content = framed(b"abc")[:-1] + b"!" + framed(b"def")
    (tmp_path / NAME).write_bytes(content)

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert recover(tmp_path) == (Damage(NAME, 0, 0, "left as it is: No space left on device"),)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(NAME, content)]
    assert recover(tmp_path)[0].done.startswith("set aside")
    assert stored_messages(tmp_path) == [b"def"]


def test_the_number_after_a_planted_one_is_known_again(tmp_path: Path) -> None:
    (tmp_path / "traces-20260218T150304Z-999999999.pb").write_bytes(b"")
    new = new_segment(tmp_path, next_number(tmp_path))
    new.write_bytes(framed(b"abc"))
    assert new.name.endswith("-1000000000.pb")
    assert stored_messages(tmp_path) == [b"abc"]


def test_a_search_for_the_next_frame_ends(tmp_path: Path) -> None:
    """A client fills its message with ends of frames, each before a length that leads to another one of them.

    Torn by a kill, 4 MB of it took 300,000 checksums of 2 MB on average.
    """
    reach = 13 * 150_000 - 4
    piece = framed(b"")[4:9] + b"\0\0\0\0" + reach.to_bytes(4, "big")
    torn = framed(piece * 322_000)[:-20]
    (tmp_path / NAME).write_bytes(framed(b"abc") + torn)
    checked = []
    crc32 = zlib.crc32
    with pytest.MonkeyPatch.context() as patched:
        count = checked.append
        patched.setattr("zlib.crc32", lambda content, value=0: count(len(content)) or crc32(content[:9], value))
        (damage,) = recover(tmp_path)
    assert sum(checked) < 1.1 * (1 << 30)
    assert damage.done.startswith("set aside")  # it has the end of a frame in it


def test_a_segment_that_becomes_shorter_while_it_is_read_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write the directory truncates it meanwhile; were it mapped, SIGBUS would end the process."""
    (tmp_path / NAME).write_bytes(frames(b"x" * (2 << 20), b"y" * (2 << 20)))
    crc32 = zlib.crc32
    monkeypatch.setattr("zlib.crc32", lambda *given: os.truncate(tmp_path / NAME, 100) or crc32(*given))
    assert recover(tmp_path) == (Damage(NAME, 0, 0, "left as it is: it became shorter while it was read"),)
    assert (tmp_path / NAME).stat().st_size == 100


@pytest.mark.parametrize("size", [1, *range((1 << 20) - 26, (1 << 20) - 14), (1 << 20) + 1, 5 << 19])
def test_frames_end_wherever_they_do(tmp_path: Path, size: int) -> None:
    """A file is read 1 MB at a time: the mark at byte 20 + ``size`` that tells where a frame ends may lie across that.

    The length of the second frame is damaged.
    """
    (tmp_path / NAME).write_bytes(framed(b"abc") + b"\0\0\0\2" + framed(b"x" * size)[4:] + framed(b"next"))
    assert recover(tmp_path) == (Damage(NAME, 16, 4 + size + 9, CORRECTED),)
    assert stored_messages(tmp_path) == [b"abc", b"x" * size, b"next"]


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "traces.pb").write_bytes(b"\0\0\1")
    assert recover(tmp_path) == ()
    assert (tmp_path / "traces.pb").read_bytes() == b"\0\0\1"


def test_a_directory_has_one_collector(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    with claimed(directory), pytest.raises(CollectorError, match="another collector writes here"), claimed(directory):
        pass
    with claimed(directory):
        assert list(directory.iterdir()) == [], "the lock leaves no file behind"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectorError, match="choose another --out"), claimed(tmp_path / "file"):
        pass
