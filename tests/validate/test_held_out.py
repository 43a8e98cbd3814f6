"""The release that ships, fitted on codegen and general, on a workload that it never saw."""

from __future__ import annotations

import pytest

from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.compare import compare
from blis_replay.validate.experiment import DEFAULT_RELEASE


@pytest.mark.parametrize(
    ("model", "ttft_bar"),
    # The first requests of Mixtral stall for a second each time while its kernels are compiled.  That is 5 of its
    # 60.5 ms of mean TTFT (published median: 55.5), which no coefficient stands for, so its bar is that gap and 2 %.
    [("7b", 0.04), ("34b", 0.04), ("70b", 0.04), ("mixtral", 0.10)],
)
def test_roleplay_was_never_fitted(model: str, ttft_bar: float) -> None:
    """Bars: mean E2E and ITL 1.5 %, mean TTFT 4 %, p99 of E2E 5 %; medians, where stalls do not count, 4 %."""
    run = replay(bundled_recording(bundled_aliases()[f"{model}-roleplay"]), load_release(DEFAULT_RELEASE))
    comparison = compare(run)
    assert comparison.uses == "held out"
    errors = {(m, s): cell.error for m, cells in comparison.metrics.items() for s, cell in cells.items()}
    bars = {("e2e", "mean"): 0.015, ("itl", "mean"): 0.015, ("ttft", "mean"): ttft_bar, ("e2e", "p99"): 0.05}
    for cell, bar in {**bars, ("ttft", "p50"): 0.04}.items():
        error = errors[cell]
        assert error is not None
        assert abs(error) <= bar, cell
