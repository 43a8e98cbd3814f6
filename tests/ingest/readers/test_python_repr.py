"""Python's printed values read as data: what is no literal stays text, what is cut is left out."""

from __future__ import annotations

import pytest
from growth import ONE_PASS, growth
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.server.python_repr import Entries, Text, read_fields, read_mapping

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), LITERALS, max_size=6))
def test_any_printed_literal_comes_back(value: dict[str, object]) -> None:
    assert read_mapping(repr(value)) == Entries(value, True)


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("KVEventsConfig(enable=True, port=5557)", {"enable": True, "port": 5557}),
        ("Outer(inner=Inner(a=[1, 2]), b=None)", {"inner": {"a": [1, 2]}, "b": None}),
        ("<Backend.FLASHINFER: 'a.b.C'>", Text("<Backend.FLASHINFER: 'a.b.C'>")),
        ("<function f at 0x7f>", Text("<function f at 0x7f>")),
        ("torch.bfloat16", Text("torch.bfloat16")),
        ("PosixPath('/models/x')", Text("PosixPath('/models/x')")),
        ("Config()", Text("Config()")),
        ("lambda x: 3", Text("lambda x: 3")),
        ("(1, (2, 3))", [1, [2, 3]]),
        ("{1, 2}", [1, 2]),
        ("null", None),
        ("true", True),
        ("-1.5e3", -1500.0),
        ('"it\'s"', "it's"),
        (r"'a\'b'", "a'b"),
        ("9" * 50, Text("9" * 50)),
    ],
)
def test_a_value_of_each_kind(printed: str, value: object) -> None:
    found = read_mapping(f"{{'a': {printed}, 'b': 2}} and more")
    assert found == Entries({"a": value, "b": 2}, True)
    assert found is not None
    assert isinstance(found.values["a"], type(value))


@pytest.mark.parametrize("cut", ["25", "'abc", "[1, 2", "Config(a=1", "{'x': 1}", "<Kind.A"])
def test_a_value_at_the_end_of_a_cut_line_may_have_been_longer(cut: str) -> None:
    assert read_mapping(f"{{'a': 1, 'b': {cut}") == Entries({"a": 1}, False)


def test_fields_without_brackets() -> None:
    said = read_fields("model='./m', served_model_name=org/m-7b, url='http://x:1', dtype=torch.half, n={'a': [1, 2]}")
    assert said.values == {
        "model": "./m",
        "served_model_name": "org/m-7b",
        "url": "http://x:1",
        "dtype": "torch.half",
        "n": {"a": [1, 2]},
    }


def test_what_is_no_mapping_is_none() -> None:
    assert read_mapping("Namespace(a=1)") is None


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["{", "'", r"\'", "<", "(,", "a=", "'a': ", "a(b=<"])
def test_each_character_is_seen_once(unit: str) -> None:
    """Looking for the end of each of 80,000 quotes again took two minutes."""
    assert growth(lambda size: read_mapping("{" + unit * size), 10_000) < ONE_PASS
    assert growth(lambda size: read_fields(unit * size), 10_000) < ONE_PASS
