"""What can be wrong with the simulator's input, as errors a user can act on."""

from __future__ import annotations

from blis_replay.compiled.errors import ExperimentError


class SimulatorError(ExperimentError, ValueError):
    """Base of the errors of this package; its text is one line for the user."""


class TraceError(SimulatorError):
    """A request trace or engine configuration that the engine cannot run."""


class ReleaseError(SimulatorError):
    """A coefficient release that is malformed, invalid, or has no entry for the model."""


class WorkloadError(SimulatorError):
    """A workload that is malformed, or too large to make."""
