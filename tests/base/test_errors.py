"""Errors that a user can cause."""

from __future__ import annotations

import pytest

from blis_replay.base.errors import MissingExtraError, require_extra


def test_a_missing_package_is_one_line_that_names_its_extra() -> None:
    require_extra("report", "the report", "json")
    with pytest.raises(MissingExtraError, match=r"the report needs no_such_1 and no_such_2.*blis-replay\[report\]'$"):
        require_extra("report", "the report", "json", "no_such_1", "no_such_2")
