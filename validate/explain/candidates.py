"""The hypotheses that are put right in an attribution, of all that apply to a replay."""

from __future__ import annotations

from dataclasses import replace

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.validate.explain.hypothesis import SCHEDULE, Hypothesis, Replayed
from blis_replay.validate.explain.inputs import contradicted, to_try
from blis_replay.validate.explain.parts import parts_of
from blis_replay.validate.explain.schedule import said_by_schedule
from blis_replay.validate.explain.search import Explanation, best_input
from blis_replay.validate.explain.standstill import standstill

MAX_INPUTS = 2  # open inputs that are wrong at once; a third cannot be distinguished from chance


def candidates(replayed: Replayed, reference: CoefficientRelease | None) -> tuple[list[Hypothesis], dict[str, str]]:
    """In which hypotheses this replay differs from the recording, inputs first; and why others cannot be put right.

    ``reference``: a release whose coefficients stand in for what was not recorded; None: nothing does.
    """
    recording = replayed.recording
    inputs = contradicted(recording, replayed.mode)
    lost = any(finding.severity == "unusable" and not finding.metric for finding in recording.findings)
    server = replayed.put_right(inputs)
    proof, wrong = ("", None) if lost else said_by_schedule(server.recording, server.mode)
    if wrong is not None:
        inputs.append(wrong)
        server = replayed.put_right(inputs)
        proof, _ = said_by_schedule(server.recording, server.mode)
    proved = {SCHEDULE: proof} if proof else {}
    still = None if lost else standstill(server)
    if still is not None:
        inputs.append(still)
        server = replayed.put_right(inputs)
    for _ in range(0 if lost else MAX_INPUTS):
        groups = to_try(server.recording, server.mode, may_be_warm=True)
        open_ones = [[one for one in group if one.proved_by not in proved] for group in groups]
        found = None if server.trial is None else best_input(server.trial, open_ones)
        if found is None:
            break
        inputs.append(_tried(found))
        server = replayed.put_right(inputs)
    parts, unable = parts_of(replayed, inputs, reference, proved)
    return [*inputs, *parts], {name: why.removeprefix(f"{recording.alias}: ") for name, why in unable.items()}


def _tried(found: Explanation) -> Hypothesis:
    """An open hypothesis, with what it rests on: nothing else explains what the requests had."""
    also = tuple(other.name for other in found.equal)
    what = "what no step time and no delay explains" if found.beside_a_fit else "the mean difference of requests"
    left = f"{what} falls from {100 * found.before:.1f} to {100 * found.left:.1f} %"
    equal = f"; {' and '.join(also)} explain it as well" if also else ""
    remedy = f"to be sure record {found.best.decides}; {found.best.remedy}" if also else found.best.remedy
    return replace(found.best, basis=f"not recorded; tried: {left}{equal}", remedy=remedy, also=also)
