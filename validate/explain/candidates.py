"""The hypotheses that are put right in an attribution, of all that apply to a replay."""

from __future__ import annotations

from blis_replay.ingest.checks import ledger
from blis_replay.ingest.recording import Recording
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, Hypothesis, Replayed, Standing
from blis_replay.validate.explain.inputs import ARGUMENTS, LENGTHS, contradicted, to_try
from blis_replay.validate.explain.parts import DECISIONS, PROMPTS, parts_of
from blis_replay.validate.explain.schedule import said_by_schedule
from blis_replay.validate.explain.search import best_input
from blis_replay.validate.explain.standstill import standstill
from blis_replay.validate.explain.trial import trial_of

MAX_INPUTS = 2  # open inputs that are wrong at once; a third cannot be distinguished from chance
# What equal schedules prove right.
SCHEDULED = (*(argument.title for argument in ARGUMENTS if argument.scheduled), DECISIONS)


def candidates(replayed: Replayed) -> tuple[list[Hypothesis], tuple[Standing, ...]]:
    """In which hypotheses this replay differs from the recording, inputs first; and how all others stand."""
    inputs, proved, decides = contradicted(replayed.recording, replayed.mode), dict[str, str](), dict[str, str]()
    server = replayed.put_right(inputs)
    if not any(finding.severity == "unusable" and not finding.metric for finding in replayed.recording.findings):
        proof, wrong = said_by_schedule(server.recording, server.mode)
        if wrong is not None:
            inputs.append(wrong)
            server = replayed.put_right(inputs)
            proof, _ = said_by_schedule(server.recording, server.mode)
        proved = counted_alike(replayed.recording) | (dict.fromkeys(SCHEDULED, proof) if proof else {})
        if (still := standstill(server)) is not None:
            inputs.append(still)
        for _ in range(MAX_INPUTS):
            server = replayed.put_right(inputs)
            known = {*proved, *(one.name for one in inputs if one.recorded)}
            groups = to_try(server.recording, server.mode, may_be_warm=True)
            unknown = [[one for one in group if one.name not in known] for group in groups]
            decides = {one.name: one.decides for group in unknown for one in group}
            trial = trial_of(server)
            best = None if trial is None else best_input(trial, unknown)
            if best is None:
                break
            before = [one for one in inputs if one.name == best.hypothesis.name]
            if before:  # a second pass corrects it, so the first answer was wrong
                inputs = [one for one in inputs if one not in before]
                break
            inputs.append(best.hypothesis)
    parts, unable = parts_of(replayed.put_right(inputs), proved)
    blamed = {one.name for one in (*inputs, *parts)}
    right = [Standing(name, PROVED_RIGHT, why) for name, why in proved.items() if name not in blamed]
    tried = [Standing(name, OPEN, "", measured) for name, measured in decides.items() if name not in blamed]
    return [*inputs, *parts], (*right, *unable, *tried)


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
