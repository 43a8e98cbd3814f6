"""Whose coefficients a recording gets, by data type and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import Planted, planted_recording, wrong_simulator

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.releases.release import UNKNOWN_HARDWARE, CoefficientRelease
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.replay.driver import replay
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.attribute import attribute
from blis_replay.validate.fit.model_fit import prior_for
from blis_replay.validate.fit.step_form import INTERCEPT
from blis_replay.validate.metrics.observed import Observed
from blis_replay_labs.studies.generalize import score


@pytest.fixture(scope="module")
def planted() -> Planted:
    return planted_recording(seed=3)


@pytest.fixture(scope="module")
def served_fp8(planted: Planted) -> Recording:
    recording = wrong_simulator(planted).recording
    return replace(recording, engine=recording.engine | {"dtype": Setting("fp8", "recorded")})


@pytest.fixture(scope="module")
def release(planted: Planted) -> CoefficientRelease:
    """The planted coefficients served as fp8; before them, for bfloat16, steps that take 10 ms longer."""
    right = wrong_simulator(planted).release
    (entry,) = right.models
    latency = replace(entry.latency, intercept_ns=entry.latency.intercept_ns + 10_000_000)
    return replace(right, models=(replace(entry, latency=latency, dtype="bfloat16"), replace(entry, dtype="fp8")))


@pytest.mark.slow
def test_every_verb_takes_the_entry_of_the_served_data_type(
    planted: Planted, served_fp8: Recording, release: CoefficientRelease
) -> None:
    fp8 = release.models[1]
    assert entry_of(release, served_fp8) == fp8
    assert replay(served_fp8, release).entry == fp8
    # The planted coefficients are the server's, so nothing is to be attributed: less than 1 % of the mean E2E.
    attribution = attribute(served_fp8, release, token_gaps=planted.token_gaps, workers=1)
    assert abs(attribution.error[0].value_us) < 0.01 * attribution.observed_us[0]
    prior = prior_for(release, served_fp8)
    assert prior[INTERCEPT].value == fp8.latency.intercept_ns / 1000
    # Steps 10 ms longer than the server's would be off by more than half.
    scored = score(Observed(served_fp8, None), release)
    assert scored.problem is None
    assert scored.step_mape is not None and scored.step_mape < 0.1


@pytest.mark.parametrize(
    ("recorded", "release_of", "refused"),
    [("A100-80GB", "H100-SXM-80GB", True), ("NVIDIA H100 80GB HBM3", "H100", False), ("CPU", UNKNOWN_HARDWARE, False)],
)
def test_no_verb_takes_coefficients_of_another_gpu(
    planted: Planted, release: CoefficientRelease, recorded: str, release_of: str, refused: bool
) -> None:
    """An error of 0 on a machine that the coefficients are not for would be luck; `--extrapolate` asks for it."""
    right = wrong_simulator(planted)
    served, of_gpu = replace(right.recording, hardware=recorded), replace(right.release, hardware=release_of)
    assert entry_of(of_gpu, served, extrapolate=True) == of_gpu.models[0]
    if refused:
        with pytest.raises(ReleaseError, match=recorded):
            replay(served, of_gpu)
    else:
        assert replay(served, of_gpu).entry == of_gpu.models[0]
