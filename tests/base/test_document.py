"""Reading documents strictly: what is refused, and how it is said."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from blis_replay.base.document import (
    IF_SET,
    REQUIRED,
    UNWRITTEN,
    YAML_ERRORS,
    FieldError,
    Number,
    Percentage,
    Text,
    Time,
    TimeNs,
    document_of,
    load_yaml,
    read_values,
    read_yaml,
    written_as,
    yaml_problem,
)


class Refused(Exception):
    pass


class Circle(Struct, frozen=True):
    radius: Annotated[float, Meta(gt=0, le=9)]


class Box(Struct, frozen=True, rename={"sides_us": "sides"}):
    sides_us: tuple[Time, ...]
    note: Text | None = None


class Shapes:
    """As ``document.Kinds``."""

    def type_of(self, kind: object, place: str) -> type:
        if kind not in ("circle", "box"):
            raise FieldError(place, "is missing" if kind is None else f"is {kind!r}", "write one of circle, box")
        return Circle if kind == "circle" else Box

    def kind_of(self, value: Any) -> str:
        return "circle" if isinstance(value, Circle) else "box"


@dataclass(frozen=True)
class Owner:
    """A pair that must be in order."""

    first: int
    last: int = 9

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise FieldError("first", "is above last", "exchange them")


class Drawing(Struct, frozen=True):
    shapes: dict[str, Annotated[Any, Meta(extra={"kinds": Shapes()})]]
    owners: tuple[Owner, ...] = ()
    share: Percentage = 0.5
    weights: dict[Literal["light", "heavy"], Number] = {}


SOUND = """
shapes:
  sun: {kind: circle, radius: 2}
  house.front: {kind: box, sides: [12.5 ms, 3 us]}
owners: [{first: 1}]
share: 10 %
weights: {light: 1}
"""


def read(text: str) -> Drawing:
    return read_yaml(text, Drawing, "mine.yaml", "a drawing", ValueError)


def test_a_document_becomes_its_type_and_is_written_again() -> None:
    """12.5 ms are 12,500 us, 10 % are 0.1; what is None is not written."""
    drawing = read(SOUND)
    shapes = {"sun": Circle(2.0), "house.front": Box((12_500.0, 3.0))}
    assert drawing == Drawing(shapes, (Owner(1),), 0.1, {"light": 1.0})
    written = document_of(drawing)
    assert written["shapes"]["house.front"] == {"kind": "box", "sides": ["12500 us", "3 us"]}
    assert read_values(written, Drawing, "x", "a drawing", ValueError) == drawing


@dataclass(frozen=True)
class Table:
    """All marks that a field can have."""

    colour: Annotated[Text, REQUIRED] = field(default="black", kw_only=True)
    seen: Annotated[int, UNWRITTEN] = 7
    left_ns: TimeNs = 1
    right_ns: Annotated[TimeNs, IF_SET] = 0
    size: Annotated[float, written_as("length")] = 2.0


def test_marks_say_how_a_field_is_written() -> None:
    """12.5 us are 12,500 ns.  An unwritten field keeps its default."""
    table = read_values({"left": "12.5 us", "length": 3, "colour": "red"}, Table, "x", "a table", ValueError)
    assert table == Table(left_ns=12_500, size=3.0, colour="red")
    assert document_of(replace(table, seen=8)) == {"colour": "red", "left": "12.5 us", "length": 3.0}
    assert document_of(replace(table, right_ns=2))["right"] == "0.002 us"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"colour": None}, "field colour: is missing; add text"),
        ({"seen": 3}, "field seen: is not a field of a table"),
        ({"size": 3}, "field size: is not a field of a table"),
        ({"length": "long"}, "field length: is 'long'; write a number"),
        ({"left": "1e9 s"}, "field left: is 1e+15 us; write a number with a unit from -1e+12 us to 1e+12 us"),
        ({"left": 3}, "field left: is 3, and not a number with a unit"),
    ],
)
def test_what_marks_do_not_allow_is_refused_by_its_written_name(change: dict[str, Any], complaint: str) -> None:
    given = {"left": "1 us", "colour": "red"} | change
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ValueError, match=f"^x, {re.escape(complaint)}"):
        read_values(given, Table, "x", "a table", ValueError)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("sun:", "sun: &s", ", line 4: not YAML (aliases"),
        ("share: 10 %", "share: 10 %\nshare: 20 %", "line 7: not YAML (the key 'share' stands there twice)"),
        ("share: 10 %", "<<: {share: 10 %}", "line 6: not YAML (merge keys (<<) are not read)"),
        ("share: 10 %", "share: " + "[" * 5000, "line 6: not YAML (it is nested too deeply)"),
        ("share: 10 %", "share: !!python/name:os.system", "line 6: not YAML (could not determine a constructor"),
        ("share: 10 %", "shares: 10 %", ", field shares: is not a field of a drawing; did you mean share?"),
        ("share: 10 %", "3: 4", ": has a key that is not text; put it in quotes"),
        ("share: 10 %", "share: 10", "field share: is 10, and not a number with a unit; write e.g. '12.5 %'"),
        ("share: 10 %", "share: -10 %", "field share: is -10 %; write a number with a unit from 0 %"),
        ("3 us", "3 weeks", "field shapes.house.front.sides[1]: has the unknown unit 'weeks'; use one of ns, us"),
        ("3 us", "1e9 s", "shapes.house.front.sides[1]: is 1e+15 us; write a number with a unit from -1e+12 us"),
        ("radius: 2", "radius: 0", "field shapes.sun.radius: is 0; write a number above 0 and at most 9"),
        ("radius: 2", "radius: .nan", "field shapes.sun.radius: is nan; write a number above 0 and at most 9"),
        ("radius: 2", "radius: .inf", "field shapes.sun.radius: is inf; write a number above 0 and at most 9"),
        ("radius: 2", "radius: true", "field shapes.sun.radius: is true; write a number above 0"),
        (", radius: 2", "", "field shapes.sun.radius: is missing; add a number above 0 and at most 9"),
        ("kind: circle", "kind: ring", "field shapes.sun.kind: is 'ring'; write one of circle, box"),
        ("kind: circle, ", "", "field shapes.sun.kind: is missing; write one of circle, box"),
        ("{first: 1}", "{first: 10}", "field owners[0].first: is above last; exchange them"),
        ("{first: 1}", "{first: 1.0}", "field owners[0].first: is 1.0; write a whole number"),
        ("{first: 1}", "7", "field owners[0]: is 7; write key: value pairs"),
        ("light: 1", "lihgt: 1", "field weights.lihgt: is not a field of a drawing; did you mean light?"),
        ("light: 1", "light: 1.0e+16", "field weights.light: is 1e+16; write a number from -1e+15 to 1e+15"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, complaint: str) -> None:
    changed = SOUND.replace(old, new, 1)
    assert changed != SOUND
    if old == "sun:":
        changed = changed.replace("{kind: box", "*s #", 1)
    with pytest.raises(ValueError, match=r"^mine\.yaml") as refused:
        read(changed)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_null_stands_for_what_may_be_absent() -> None:
    assert read(SOUND.replace("share: 10 %", "share: null")).share == 0.5
    with pytest.raises(ValueError, match="field shapes: is empty; write key: value pairs"):
        read("shapes: null")


def test_further_fields_are_read_over_where_a_document_is_of_others() -> None:
    given = {"shapes": {"sun": {"kind": "circle", "radius": 1, "colour": "red"}}, "frame": 3}
    assert read_values(given, Drawing, "x", "", ValueError).shapes == {"sun": Circle(1.0)}


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["3 us", "5 %", "circle"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["shapes", "kind", "sides", "radius", "first"]) | st.text(), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(JUNK, JUNK, st.sampled_from(["shapes", "owners", "share", "weights"]))
def test_nothing_that_stands_there_crashes_the_reader(junk: Any, other: Any, field: str) -> None:
    for values in (junk, {"shapes": {"a": other, "b": junk}}, {"shapes": {}, field: junk}):
        with suppress(Refused):
            read_values(values, Drawing, "x", "a drawing", Refused)


@given(st.text() | st.binary())
def test_no_text_crashes_the_loader(text: str | bytes) -> None:
    try:
        load_yaml(text)
    except YAML_ERRORS as error:
        assert "\n" not in "".join(yaml_problem(error))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!int +", "line 1: '+' cannot be read as int"),
        ("a: !!timestamp x", "line 1: 'x' cannot be read as timestamp"),
        ("a: !!bool x", "line 1: 'x' cannot be read as bool"),
        ("a:\n  ? [b]\n  : c", "line 2: a key that is a list or a mapping"),
        ("a: !!set {b}", "line 1: 'set' is neither a list nor a mapping"),
        ("a: !!omap [b: 1]", "line 1: 'omap' is neither a list nor a mapping"),
        ("a: 1" + ":59" * 200, "line 1: a number of more than 400 digits"),
        ("a: 0x" + "f" * 400, "line 1: a number of more than 400 digits"),
    ],
)
def test_a_text_that_does_not_fit_its_tag_is_named_with_its_line(text: str, problem: str) -> None:
    """The library's own constructors end in IndexError, AttributeError, KeyError and TypeError."""
    with pytest.raises(YAML_ERRORS) as refused:
        load_yaml(text)
    assert ": ".join(yaml_problem(refused.value)) == problem
