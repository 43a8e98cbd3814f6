"""Protobuf from the outside, on the worked examples of the encoding's documentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.readers.otlp.protobuf_decoder import WireError, messages, varint


def test_a_varint_has_seven_bits_a_byte_lowest_first() -> None:
    # The encoding guide's example: 150 is 96 01.
    assert varint(b"\x96\x01", 0) == (150, 2)
    assert varint(b"\xff\x00", 1) == (0, 2)


@pytest.mark.parametrize("data", [b"", b"\x96", b"\xff" * 11])
def test_a_varint_that_does_not_end_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        varint(data, 0)


def test_length_delimited_fields_are_found_among_others() -> None:
    # The guide's 08 96 01 (field 1, varint 150), 12 07 "testing" (field 2), and fixed fields 3 and 4.
    data = b"\x08\x96\x01" + b"\x12\x07testing" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x12\x05cut"
    assert list(messages(data)) == [(2, b"testing", True), (2, b"cut", False)]


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_named_problem(data: bytes) -> None:
    try:
        found = list(messages(data))
    except WireError:
        return
    assert sum(len(content) for _number, content, _whole in found) <= len(data)
