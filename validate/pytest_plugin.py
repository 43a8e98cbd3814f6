"""A plugin of pytest: ``blis_replay("34b-general", simulator="cmd:./mine").passes()`` in a test of a simulator.

pytest imports this file at every start, so it imports nothing before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from blis_replay.validate.text.answer import Answer


@dataclass(frozen=True)
class Fidelity:
    """A judgement in a test; ``answer``: its numbers (``.frame``), its text and its exit code."""

    answer: Answer

    def passes(self) -> None:
        """Fail the test with the text of the judgement, unless it is PASS or FITS."""
        if self.answer.exit_code:
            pytest.fail(str(self.answer), pytrace=False)


@pytest.fixture(scope="session")
def blis_replay() -> Callable[..., Fidelity]:
    """A function that judges a simulator on an experiment, with the arguments of ``validate.api.validate``.

    What cannot be judged, as a simulator that ends with an error, fails the test with one line.
    """

    def judged(name: str, simulator: str = "embedded", **options: Any) -> Fidelity:
        from blis_replay.base.errors import BlisReplayError
        from blis_replay.validate.api import validate

        try:
            return Fidelity(validate(name, simulator=simulator, **options))
        except BlisReplayError as error:
            why = f"{name}: {error}"
        pytest.fail(why, pytrace=False)  # not above: pytest would print the error as its cause too

    return judged
