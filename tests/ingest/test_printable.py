"""Texts of unknown origin on their way to a terminal."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError, StoreError, printable


def test_control_characters_are_written_out_and_white_space_is_a_space() -> None:
    assert printable("a\x1b[31m\tb\nc\u202e\x9b") == "a\\x1b[31m b c\\u202e\\x9b"
    assert printable(os.fsdecode(b"\xff")) == "\\udcff"
    assert printable("CodeLlama 34b ± 日本") == "CodeLlama 34b ± 日本"


@given(st.text(st.characters()))
def test_whatever_comes_can_be_printed_on_one_line_and_stays_as_it_is_then(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    shown.encode()


def test_errors_are_one_line_whatever_the_path_is_called() -> None:
    for error in (RecordingError("a\nb\x1b", "", "problem", "mend"), StoreError("a\nb\x1b: problem; mend")):
        assert str(error) == "a b\\x1b: problem; mend"
