"""What can be wrong with the simulator's input, as errors a user can act on."""

from __future__ import annotations

from blis_replay.base.errors import ExperimentError


class SimulatorError(ExperimentError, ValueError):
    """Base of the errors of this package; its text is one line for the user."""


class TraceError(SimulatorError):
    """A request trace or engine configuration that the engine cannot run."""


def evicting_for_ever(now_us: int, requests: str = "requests") -> TraceError:
    """The error of an engine in which nothing will ever move again."""
    return TraceError(
        f"at {now_us} us {requests} evict each other for ever without a token; "
        "raise num_gpu_blocks, or break the ties in priority and arrival time"
    )


class ReleaseError(SimulatorError):
    """A coefficient release that is malformed, invalid, or has no entry for the model."""
