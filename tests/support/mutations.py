"""JSON with something wrong in it, for every reader of it: values replaced, keys lost, bytes cut or overwritten."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

# What untrusted JSON has where a number, a text or an object is expected.
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 1e300, -1e300, 2**64, 10**400, 0.5, "", "7", "NaN", "\ud800"),
    *([], [[]], {}, {"a": None}, [None]),
]
ODD = st.sampled_from(ODD_VALUES)


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, but the value itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in [(*here, key), *paths_of(item, (*here, key))]]


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """``document`` with one to three values replaced by odd ones or taken out."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        paths = paths_of(changed)
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        holder = changed
        for key in way:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = copy.deepcopy(draw(ODD))
        else:
            del holder[last]
    return changed


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> bytes:
    """The text of ``document`` with a stretch of it cut out, overwritten or cut off."""
    text = json.dumps(document).encode()
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, len(text)))
    return text[:begin] + draw(st.binary(max_size=20)) + (text[end:] if draw(st.booleans()) else b"")
