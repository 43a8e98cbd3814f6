"""Everything a page says about one experiment, before it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.errors import ExperimentError, faults_named
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.checks.registry import check_evidence, check_names, named_check
from blis_replay.ingest.store import Store
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.validated import by_stage, compare_experiment
from blis_replay.validate.explain.attribute import Attribution, attribute
from blis_replay.validate.metrics.observed import Gaps, on_both_sides, pooled_gaps


@dataclass(frozen=True)
class Evidence:
    """A comparison with what explains it.

    ``compared``: bool[n], requests with observed and simulated latencies; none of published aggregates.
    ``token_gaps``: observed, pooled, of the compared requests.  ``attribution``: the parts of the error, or why
    they are not known.  ``checks``: those with a finding, with their tables.
    """

    comparison: Comparison
    stages: tuple[Comparison, ...]
    compared: NDArray[np.bool_]
    token_gaps: Gaps | None
    attribution: Attribution | str
    checks: tuple[CheckEvidence, ...]

    @property
    def run(self) -> ReplayRun:
        """The replay."""
        return self.comparison.run


def gather(store: Store, slug: str, release: CoefficientRelease, mode: ReplayMode, options: str = "") -> Evidence:
    """Replay a stored experiment and collect the evidence; ``options``: what printed commands repeat.

    The store is only read.  Raises as ``compare_experiment`` does.
    """
    comparison = compare_experiment(store, slug, release, mode)
    run = comparison.run
    compared = on_both_sides(run)
    gaps = pooled_gaps(store, slug, compared) if compared.any() else None
    try:
        with faults_named(run.recording.alias):
            attribution: Attribution | str = attribute(
                run.recording, run.release, run.mode, token_gaps=gaps, errors=comparison.estimates, options=options
            )
    except ExperimentError as error:
        attribution = str(error)
    known = check_names()  # a store may have findings of a check that another version had
    checks = [name for name in dict.fromkeys(f.check for f in comparison.recording.findings) if name in known]
    return Evidence(
        comparison=comparison,
        stages=tuple(by_stage(store, comparison)) if len(run.recording.stages) > 1 else (),
        compared=compared,
        token_gaps=gaps,
        attribution=attribution,
        checks=check_evidence(store, slug, map(named_check, checks), run.recording),
    )
