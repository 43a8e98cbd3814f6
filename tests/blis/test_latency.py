"""Step times of the linear kinds: integer nanoseconds, the oracle's rounding and BLIS's."""

from __future__ import annotations

import pytest

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import step_duration_us
from blis_replay.blis.latency import LatencyModel


def duration_us(model: LatencyModel, prefill: int, decode: int, context: int = 0) -> int:
    return int(step_duration_us(model.coefficients_ns(), prefill, decode, context))


@pytest.mark.parametrize(
    ("rounding", "expected_us"),
    # The oracle's own step: 7000 + 18*636 us, and 7000 + 25 + 0.01*637 us of decode (7031.37).
    [("round_half_up", [18448, 7031]), ("truncate", [18448, 7031])],
)
def test_the_first_steps_of_the_oracle(rounding: str, expected_us: list[int]) -> None:
    model = LatencyModel("blackbox", 7_000_000, 18_000, 25_000, 10, rounding=rounding)  # type: ignore[arg-type]
    assert [duration_us(model, 636, 0), duration_us(model, 0, 1, 637)] == expected_us


@pytest.mark.parametrize(("rounding", "expected_us"), [("round_half_up", 1001), ("truncate", 1000)])
def test_half_a_microsecond(rounding: str, expected_us: int) -> None:
    """1000.5 us: half up gives 1001, truncation 1000."""
    assert duration_us(LatencyModel("blackbox", 1_000_500, 0, 0, rounding=rounding), 0, 1) == expected_us  # type: ignore[arg-type]


def test_a_floor_binds_until_compute_exceeds_it() -> None:
    """max(5000, 1000 + 10 * prefill): 5000 up to 400 tokens, 6000 at 500."""
    model = LatencyModel("floor", 1_000_000, 10_000, 0, floor_ns=5_000_000)
    assert [duration_us(model, tokens, 0) for tokens in (0, 400, 500)] == [5000, 5000, 6000]


def test_no_step_is_shorter_than_a_microsecond() -> None:
    assert duration_us(LatencyModel("blackbox", 0, 0, 0), 0, 1) == 1


@pytest.mark.parametrize(
    ("intercept_us", "per_decode_ns", "batch"),
    # The published per-model lines: 5525 / 215.1 = 25.7, 2633 / 106.4 = 24.7, 8035 / 249.3 = 32.2; 992 is positive.
    [(-5525, 215_100, 26), (-2633, 106_400, 25), (-8035, 249_300, 33), (992, 7_031, 1)],
)
def test_the_smallest_batch_with_a_positive_step_time(intercept_us: int, per_decode_ns: int, batch: int) -> None:
    assert LatencyModel("blackbox", intercept_us * 1000, 0, per_decode_ns).smallest_positive_batch() == batch


def test_a_model_that_is_never_positive_is_refused() -> None:
    with pytest.raises(ReleaseError, match="not positive at any size"):
        LatencyModel("blackbox", -1, 0, 0).smallest_positive_batch()
