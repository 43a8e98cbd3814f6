"""One root of all errors that a user can cause, drawn in one place."""

from __future__ import annotations

import re

import pytest

import blis_replay.compiled.errors as errors
import blis_replay.replay.blis_binary
import blis_replay.replay.command
import blis_replay.replay.request_table
import blis_replay.validate.errors  # noqa: F401
from blis_replay.compiled.errors import BlisReplayError, MissingExtraError, require_extra


def drawn() -> dict[str, tuple[int, int]]:
    """Name of each class in the docstring: how deep it stands, and its exit code."""
    lines = re.findall(r"^    ([│ ]*(?:[├└]── )?)(\w+Error) +(.*)$", errors.__doc__ or "", re.MULTILINE)
    return {
        name: (len(branch) // 4, int((re.search(r"exit code (\d)", text) or [0, 3])[1])) for branch, name, text in lines
    }


def tree(kind: type[BlisReplayError], depth: int = 0) -> dict[str, tuple[int, int]]:
    found = {kind.__name__: (depth, kind.exit_code)}
    for part in kind.__subclasses__():
        if part.__module__.startswith("blis_replay.") and not part.__name__.startswith("_"):
            found |= tree(part, depth + 1)
    return found


def test_the_tree_that_is_drawn_is_the_one_there_is() -> None:
    assert drawn() == tree(BlisReplayError)


def test_a_missing_package_is_one_line_that_names_its_extra() -> None:
    require_extra("report", "the report", "json")
    with pytest.raises(MissingExtraError, match=r"the report needs no_such_1 and no_such_2.*blis-replay\[report\]'$"):
        require_extra("report", "the report", "json", "no_such_1", "no_such_2")
