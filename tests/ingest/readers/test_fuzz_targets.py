"""The fuzzer's targets hold for the inputs it begins with, and for a few of those it makes of them.

The fuzzer itself needs a library that the project does not; without this test its rules would fall
behind the readers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_targets import TARGETS

from blis_replay.ingest.readers.formats import REQUEST_FORMATS


def test_every_format_of_requests_is_a_target() -> None:
    assert {form.name for form in REQUEST_FORMATS} < TARGETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_rules_hold_for_seeds_and_some_of_what_is_made_of_them(name: str, tmp_path: Path) -> None:
    """A broken rule is an AssertionError, anything but the readers' own errors an error."""
    target, rng = TARGETS[name], random.Random(1)  # noqa: S311 - the same every time
    seeds = target.seeds()
    assert seeds
    for content in seeds:
        target.run(content, tmp_path)
        for mutate in target.mutators:
            target.run(mutate(content, rng), tmp_path)
