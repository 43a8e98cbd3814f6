"""Recordings whose real server is the embedded engine, and simulators that are wrong in one known thing.

::

    planted = planted_recording(seed=3)                      # Recording, true release, truth
    wrong = wrong_simulator(planted, "step_time")            # one of CAUSES, or several
    exact = replay(planted.recording, planted.release)       # equal to the recording, to the microsecond
    off = replay(wrong.recording, wrong.release, parse_mode(wrong.replay))

The recording is complete: a journey of each request, the steps, prompt identities, token gaps.  It is in memory;
``ingest_recording`` brings it into a store (give ``token_file`` then).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blis_replay.base.arrays import Int64s
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.replay.engine import with_engine
from blis_replay_labs.planted.causes import OUTPUT, PRE_QUEUE, delay, line, mode
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.faults import PLANTED, Cause, WrongSimulator, true_release
from blis_replay_labs.planted.frames import recording_of
from blis_replay_labs.planted.generate import generate


@dataclass(frozen=True)
class Planted:
    """A recording, the release that its server really followed, and everything that is true of it."""

    recording: Recording
    release: CoefficientRelease
    truth: SyntheticTruth

    @property
    def token_gaps(self) -> tuple[Int64s, Int64s]:
        """``(gap_us, count)``: int64 arrays, gaps between output tokens at the client, all requests pooled."""
        return self.truth.result.inter_token_gaps(self.truth.ok)


def planted_recording(seed: int = 1, spec: SyntheticExperiment = PLANTED, token_file: Path | None = None) -> Planted:
    """Serve the load of ``spec`` with the embedded engine and record all of it; ``token_file``: of ``recording_of``."""
    truth = generate(replace(spec, seed=seed))
    return Planted(recording_of(truth, token_file), true_release(truth), truth)


def _half_of_the_blocks(wrong: WrongSimulator) -> WrongSimulator:
    """Requests wait for memory and are evicted."""
    blocks = int(wrong.recording.engine["num_gpu_blocks"].value) // 2
    return replace(wrong, recording=with_engine(wrong.recording, {"num_gpu_blocks": blocks}, "planted"))


# What can be planted, by the component that is to blame.
CAUSES: dict[str, Cause] = {
    "step_time": line(intercept=1.25),
    "pre_queue": delay(PRE_QUEUE, pre_queue_us=12_000),
    "output_processing": delay(OUTPUT, post_token_us=400, post_request_us=5_000),
    "arrivals": mode("arrivals", "arrivals=flat"),
    "lengths": mode("output lengths", "lengths=re-tokenised"),
    "prefix": mode("prefix cache", "prefix=none"),
    "scheduling": mode("scheduling mode", "scheduling=synchronous"),
    "kv_blocks": Cause("KV blocks", "half of them", ("KV blocks",), simulator=_half_of_the_blocks),
}


def wrong_simulator(planted: Planted, *causes: str) -> WrongSimulator:
    """A simulator that is wrong in all ``causes`` (keys of ``CAUSES``) and in nothing else; exact without any."""
    wrong = WrongSimulator(planted.recording, planted.release)
    for cause in causes:
        wrong = _simulator(CAUSES[cause])(wrong)
    return wrong


def wrong_release(planted: Planted, cause: Cause) -> CoefficientRelease:
    """The planted release with a cause of ``blis_replay_labs.planted.causes`` in its coefficients."""
    return _simulator(cause)(WrongSimulator(planted.recording, planted.release)).release


def _simulator(cause: Cause) -> Callable[[WrongSimulator], WrongSimulator]:
    assert cause.simulator is not None
    return cause.simulator
