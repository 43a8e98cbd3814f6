"""Values out of nested JSON: places, several documents, bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import records as nested_json
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import JsonPath, place_of, wanted_values


def taken(folder: Path, content: bytes, depth: int) -> tuple[list[tuple[JsonPath, Any]], RecordedFile]:
    file = recorded_file(folder, content)
    return list(wanted_values(file, lambda place: len(place) == depth)), file


def test_values_come_with_their_places_and_whole(tmp_path: Path) -> None:
    content = b'{"a": [1, {"b": [2]}], "c": {}} [3]'
    found, file = taken(tmp_path, content, 3)
    assert found == [((0, "a", 0), 1), ((0, "a", 1), {"b": [2]})]
    assert taken(tmp_path, content, 2)[0] == [((0, "a"), [1, {"b": [2]}]), ((0, "c"), {}), ((1, 0), 3)]
    assert file.tally.rejected_count == 0


def test_a_place_in_words() -> None:
    assert place_of((0, "a", 3, "b")) == "a[3].b"
    assert (place_of((0,)), place_of((2, "a"))) == ("document 1", "document 3, a")


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": nope}', b"\xff\xfe", b'[1] {"a"', b"[1e999]"])
def test_what_is_no_json_is_rejected_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    _found, file = taken(tmp_path, content, 2)
    assert file.tally.rejected_count == 1
    assert "nope" not in file.tally.rejected[0][1]


@pytest.mark.parametrize("content", [b"[" * 100, b'{"a":' * 100, b'{"a": ' + b"[" * 100])
def test_nesting_is_bounded(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RecordingError, match="nested deeper than 64 levels"):
        taken(tmp_path, content, 2)


def test_a_value_and_a_text_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_json, "MAX_VALUE_EVENTS", 100)
    with pytest.raises(RecordingError, match="more than 100 values"):
        taken(tmp_path, json.dumps({"a": [0] * 200}).encode(), 2)
    monkeypatch.setattr(nested_json, "MAX_TOKEN_BYTES", 1 << 20)
    with pytest.raises(RecordingError, match="a text of more than 1 MB"):
        taken(tmp_path, b'{"a": "' + b"x" * (3 << 20), 3)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(documents=st.lists(st.dictionaries(st.text(max_size=5), _JSON, max_size=4), min_size=1, max_size=3))
def test_values_are_those_of_a_whole_reading(tmp_path_factory: pytest.TempPathFactory, documents: list[Any]) -> None:
    content = "\n".join(map(json.dumps, documents)).encode()
    found, file = taken(tmp_path_factory.mktemp("j"), content, 2)
    assert found == [((i, key), value) for i, document in enumerate(documents) for key, value in document.items()]
    assert file.tally.rejected_count == 0


def test_numbers_that_python_writes_and_json_lacks_are_texts(tmp_path: Path) -> None:
    """SGLang writes its default rate as ``Infinity``; the words stay inside a text, wherever a read of 64 KB ends."""
    infinity, nan = float("inf"), float("nan")
    said = 'so Infinity, [NaN, "1] \\\\", NaN'
    for padding in (0, *range(65_440, 65_545)):
        content = json.dumps({"p": "x" * padding, "rate": infinity, "x": [nan, -infinity], "said": said, "y": nan})
        found, file = taken(tmp_path, content.encode(), 2)
        values = {path[1]: value for path, value in found}
        assert (values["rate"], values["x"], values["y"]) == ("Infinity", ["NaN", "-Infinity"], "NaN"), padding
        assert (values["said"], values["p"]) == (said, "x" * padding)
        assert file.tally.rejected_count == 0
