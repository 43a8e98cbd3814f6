"""The hypotheses that are put right in an attribution, of all that apply to a replay."""

from __future__ import annotations

from dataclasses import replace

from blis_replay.ingest.checks import ledger
from blis_replay.ingest.recording import Recording
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, Hypothesis, Replayed, Standing
from blis_replay.validate.explain.inputs import ARGUMENTS, LENGTHS, contradicted, to_try
from blis_replay.validate.explain.parts import DECIDES, DECISIONS, PROMPTS, parts_of
from blis_replay.validate.explain.schedule import said_by_schedule
from blis_replay.validate.explain.search import Explanation, best_input
from blis_replay.validate.explain.standstill import standstill

MAX_INPUTS = 2  # open inputs that are wrong at once; a third cannot be distinguished from chance


def candidates(replayed: Replayed) -> tuple[list[Hypothesis], tuple[Standing, ...]]:
    """In which hypotheses this replay differs from the recording, inputs first; and how all others stand."""
    recording = replayed.recording
    inputs = contradicted(recording, replayed.mode)
    lost = any(finding.severity == "unusable" and not finding.metric for finding in recording.findings)
    server = replayed.put_right(inputs)
    proof, wrong = ("", None) if lost else said_by_schedule(server.recording, server.mode)
    if wrong is not None:
        inputs.append(wrong)
        server = replayed.put_right(inputs)
        proof, _ = said_by_schedule(server.recording, server.mode)
    proved = {} if lost else {**counted_alike(recording), **(dict.fromkeys(SCHEDULED, proof) if proof else {})}
    still = None if lost else standstill(server)
    if still is not None:
        inputs.append(still)
        server = replayed.put_right(inputs)
    open_ones: list[list[Hypothesis]] = []
    for _ in range(0 if lost else MAX_INPUTS):
        groups = to_try(server.recording, server.mode, may_be_warm=True)
        known = {*proved, *(one.name for one in inputs if one.recorded)}
        open_ones = [[one for one in group if one.name not in known] for group in groups]
        found = None if server.trial is None else best_input(server.trial, open_ones)
        if found is None:
            break
        inputs.append(_tried(found))
        server = replayed.put_right(inputs)
    parts, unable = parts_of(replayed, inputs, proved)
    blamed = {one.name for one in (*inputs, *parts)}
    stated = {one.name: one.decides for group in open_ones for one in group if one.name not in blamed}
    return [*inputs, *parts], (
        *(Standing(name, PROVED_RIGHT, why) for name, why in proved.items() if name not in blamed),
        *(
            Standing(name, OPEN, why.removeprefix(f"{recording.alias}: "), DECIDES[name])
            for name, why in unable.items()
        ),
        *(Standing(name, OPEN, "", decides) for name, decides in stated.items()),
    )


# What equal schedules prove right.
SCHEDULED = (*(argument.title for argument in ARGUMENTS if argument.scheduled), DECISIONS)


def counted_alike(recording: Recording) -> dict[str, str]:
    """Lengths that the server counts as the client does, by name, with the proof in words."""
    proved = {}
    for name, quantity in ((LENGTHS, ledger.DECODED), (PROMPTS, ledger.PROMPT)):
        stated = [e for e in ledger.entries(recording) if e.quantity == quantity]
        beside = [e for e in stated[1:] if e.source in ledger.OF_SERVER and e.is_bounded]
        if beside and not any(e.contradicts(stated[0]) for e in stated[1:]):
            first = stated[0]
            proved[name] = f"{beside[0].source}: {beside[0].stated()} {quantity}; {first.source}: {first.stated()}"
    return proved


def _tried(found: Explanation) -> Hypothesis:
    """An open hypothesis, with what it rests on: nothing else explains what the requests had."""
    also = tuple(other.name for other in found.equal)
    what = "what no step time and no delay explains" if found.beside_a_fit else "the mean difference of requests"
    left = f"{what} falls from {100 * found.before:.1f} to {100 * found.left:.1f} %"
    equal = f"; {' and '.join(also)} explain it as well" if also else ""
    remedy = f"to be sure record {found.best.decides}; {found.best.remedy}" if also else found.best.remedy
    return replace(found.best, basis=f"not recorded; tried: {left}{equal}", remedy=remedy, also=also)
