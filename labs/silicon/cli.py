"""What ``blis-replay coefficients make --operators`` makes."""

from __future__ import annotations

from typing import Any

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay_labs.silicon.tabulate import Deployment, silicon_release


def measured_release(
    name: str, model: str, deployment: tuple[Any, ...]
) -> tuple[CoefficientRelease, str, dict[str, object]]:
    """A release of measured operator times, how well its tables interpolate them in words, and its fields of the JSON.

    ``deployment``: the fields of ``Deployment``.  Needs aiconfigurator-core to make, and nothing to run: the release
    carries the tables.  The time of the host is not in them; a recording can fit it.
    """
    release, tabulated = silicon_release(name, model, Deployment(*deployment))
    said = (
        f": {tabulated.tables.source}; interpolation is off by {tabulated.mean_error:.1%} on average, "
        f"{tabulated.largest_error:.1%} at most, over {tabulated.batches} random batches"
    )
    fields = {
        "model": model,
        "system": tabulated.system,
        "interpolation_mean_error": tabulated.mean_error,
        "interpolation_largest_error": tabulated.largest_error,
    }
    return release, said, fields
