"""A coefficient release whose step times are trees, so that every verb can run them."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency import Lifecycle
from blis_replay.blis.release import CoefficientRelease, FittedOn, ModelEntry, parse_release
from blis_replay.blis.release_text import format_release
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.calibration.step_errors import step_targets
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.trees.fit import fit_trees, joined_steps


def trees_release(recordings: Sequence[Recording], name: str, delays: CoefficientRelease) -> CoefficientRelease:
    """Trees for the step cycles of each model recorded, and the delays that ``delays`` has for it (none: 0).

    Raises ``ValidateError`` for no recordings, one without step cycles, or where LightGBM is not installed.
    """
    if not recordings:
        raise ValidateError("no recordings to fit trees to; name some with step records")
    by_model: dict[tuple[str, int], list[Recording]] = {}
    for recording in recordings:
        by_model.setdefault((model_of(recording), recording.tensor_parallelism or 1), []).append(recording)
    entries = []
    for (model, tensor_parallelism), parts in by_model.items():
        trees = fit_trees(joined_steps([step_targets(recording).cycle for recording in parts])).model
        entries.append(ModelEntry(model, tensor_parallelism, trees, _delays(parts[0], delays)))
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=f"Gradient-boosted trees fitted to step cycles of {', '.join(r.alias for r in recordings)}.",
        source=f"LightGBM; delays of release {delays.name}",
        hardware=", ".join(sorted({recording.hardware or "not stated" for recording in recordings})),
        sha256="",
        models=tuple(entries),
        fitted_on=tuple(FittedOn(r.slug, r.content_hash, "steps") for r in recordings),
        published_replay={},
        published_errors={},
    )
    return parse_release(format_release(release), name)


def _delays(recording: Recording, release: CoefficientRelease) -> Lifecycle:
    try:
        return entry_of(release, recording).lifecycle
    except ReleaseError:
        return Lifecycle()
