"""The words of every remark on a judgement, by its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blis_replay.base.errors import counted
from blis_replay.validate.judgement import Remark
from blis_replay.validate.metrics.latency import METRIC_NAMES
from blis_replay.validate.text.cells import percent, percent_plain, percent_span, step_times, time_span, time_text

if TYPE_CHECKING:
    from blis_replay.validate.metrics.skill import Skill


def words(remark: Remark) -> str:
    """A remark as a sentence."""
    return MESSAGES[remark.code](**remark.values)


def _named(errors: Mapping[str, float], written: Callable[[float], str]) -> str:
    return ", ".join(f"{METRIC_NAMES[metric]} {written(value)}" for metric, value in errors.items())


def _draws(count: int, ranges: Mapping[str, tuple[float, float, float]]) -> str:
    parts = [
        f"{METRIC_NAMES[metric]} {percent(middle)} ({percent(low)} to {percent(high)})"
        for metric, (low, middle, high) in ranges.items()
    ]
    return (
        f"When each request came was not published. Errors are of one reconstruction of it, intervals of {count}; "
        f"median error of the mean and range over all: {', '.join(parts)}"
    )


def _repeats(recordings: Sequence[str], apart: Mapping[str, float]) -> str:
    return (
        f"{len(recordings)} recordings of this load differ in the mean by up to {_named(apart, percent_plain)} "
        f"({', '.join(recordings)}); observed numbers, errors and intervals are of all of them"
    )


def _warm_up(
    requests: int,
    until_us: int,
    late_us: float,
    p99_without: float,
    stalls: int,
    stalled_us: int,
    p99_replayed: float | None,
) -> str:
    replayed = "" if p99_replayed is None else f", with --replay warm_up=recorded {percent(p99_replayed)}"
    return (
        f"warm-up: the first {counted(requests, 'request')} (until second {until_us / 1e6:.1f}) got first tokens "
        f"{late_us / 1e6:.2f} s later than simulated, as the server was warming up ({counted(stalls, 'stall')}, "
        f"{stalled_us / 1e6:.1f} s together); without them the TTFT error at p99 is {percent(p99_without)}{replayed}"
    )


def _trend(change: float, low: float, high: float) -> str:
    which = "slower" if change < 0 else "faster"
    return (
        f"drift: from the first request to the last the error changes by {percent(change)} (99.8 %: "
        f"{percent_span(low, high)}), as on a server that gets {which} under equal load"
    )


def _needs_requests(name: str, requests: int, least: int | None = None, first: str = "") -> str:
    if least is None:
        return f"about {requests:,} requests of this load would decide {name}"
    return f"about {least:,} requests of this load would decide {first}, and {requests:,} all of {name}"


def _predicted(between_us: Mapping[str, tuple[float, float]]) -> str:
    ends = [f"{METRIC_NAMES[metric]} {time_span(*both)}" for metric, both in between_us.items()]
    return f"coefficients: other values that fit as well simulate {', '.join(ends)} (95 %; not part of the verdict)"


def _parts(parts: Mapping[str, tuple[float | None, float | None]]) -> str:
    """The mean of each part on both sides, and which part of the TTFT is off most."""
    named = {name: PART_NAMES[name] for name in parts}
    said = [f"{named[name]} {time_text(seen)} ({time_text(simulated)})" for name, (seen, simulated) in parts.items()]
    off = {n: them - us for n, (us, them) in parts.items() if n != "first_gap" and us is not None and them is not None}
    most = max(off, key=lambda name: abs(off[name]), default="")
    worst = f"; most off: {named[most]} by {'-' if off[most] < 0 else '+'}{time_text(abs(off[most]))}" if most else ""
    return f"mean TTFT in parts, observed (simulated): {', '.join(said[:-1])}{worst}; then {said[-1]}"


def _skill(skills: Mapping[str, Skill]) -> str:
    known = {metric: one.beside_line for metric, one in skills.items()}
    line = ", ".join(f"{METRIC_NAMES[m]} {'-' if skill is None else f'{skill:+.2f}'}" for m, skill in known.items())
    crps = _named({metric: one.share for metric, one in skills.items()}, percent_plain)
    repeats = [f"{METRIC_NAMES[m]} {r:.1f}" for m, one in skills.items() if (r := one.beside_repeats) is not None]
    beside = f"; over the difference of repeats {', '.join(repeats)}" if repeats else ""
    return f"skill (1: every request is right, 0: as a straight line in the lengths): {line}; CRPS {crps}{beside}"


def _not_recorded(arguments: Sequence[tuple[str, str | None, str]]) -> str:
    named = ", ".join(
        f"{name} ({'' if value is None else f'{value} assumed; '}{why})" for name, value, why in arguments
    )
    return f"not recorded: {named}; give what you know with `blis-replay ingest --engine FILE`"


def _checks(findings: Sequence[tuple[str, str, str]]) -> str:
    """Severity, check and metric of the findings that changed or removed a number."""
    parts = []
    for severity in ("unusable", "corrected"):
        of_severity = [(check, metric) for found, check, metric in findings if found == severity]
        named = [
            f"{check} ({METRIC_NAMES[metric]})" if metric in METRIC_NAMES else check for check, metric in of_severity
        ]
        parts += [f"{severity}: {', '.join(dict.fromkeys(named))}"] if named else []
    return f"instrument checks: {'; '.join(parts)}"


def attainment_line(document: Mapping[str, Any]) -> str:
    """One line for a reader of an ``Attainment.document``: whether the objectives are met, what is missed, the goodput.

    "not known" where every objective that is not met has no value, unless no request at all was good.
    """
    missed = [one for one in document["objectives"] if not one["met"]]
    unknown = all(one["value_ms"] is None for one in missed) and document["goodput"] != 0
    verdict = "met" if document["met"] else "not known" if unknown else "missed"
    shown = missed_text(document) or _compared(document["objectives"])
    share = "-" if document["goodput"] is None else f"{document['goodput']:.1%}"
    return f"SLO {verdict}: {shown}; goodput {share} of the requests"


def missed_text(document: Mapping[str, Any]) -> str:
    """The limits of an ``Attainment.document`` that do not hold, with what there is instead; empty if all do."""
    return _compared([one for one in document["objectives"] if not one["met"]])


def _compared(objectives: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{METRIC_NAMES[one['metric']]} {one['statistic']} {_shown(one['value_ms'])} of {_shown(one['limit_ms'])} ms"
        for one in objectives
    )


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")


PART_NAMES = {
    "client": "way to and from the client",
    "queue": "queue before prefill",
    "prefill": "prefill",
    "hand_over": "hand-over",
    "load": "wait and load",
    "first_step": "first decode step",
    "first_gap": "first gap",
}
_SIDES = {"observed": "the recording", "simulated": "the replay"}


def _saturates(from_s: float, until_s: float | None) -> str:
    if until_s is None:
        return f"the server saturates at {from_s:,.1f} s; latencies after that are not comparable"
    return f"the server is saturated from {from_s:,.1f} s to {until_s:,.1f} s; latencies between are not comparable"


def _queues(side: str, from_s: float, in_flight: int | None, longest_s: float) -> str:
    flight = "" if in_flight is None else f", with {in_flight:,} requests in flight"
    return f"{_SIDES[side]} queues from {from_s:,.1f} s on{flight}; the longest wait is {longest_s:,.1f} s"


def _client_limits(limits: Sequence[tuple[int | None, float, int]], answered: bool) -> str:
    held = [
        f"{'' if stage is None else f'in stage {stage}, '}from second {from_s:,.1f} on, {in_flight:,}"
        for stage, from_s, in_flight in limits
    ]
    limit = f"the client held its requests in flight at a limit ({'; '.join(held)}): it sent one when another was done"
    if answered:
        return f"{limit}, and so does the replay"
    return (
        f"{limit}. Its arrivals carry the server's speed, so a slower simulator builds a queue that this client would "
        "not have built, and a faster one idles"
    )


MESSAGES: Mapping[str, Callable[..., str]] = {
    # Why the verdict is missing, and what would decide.
    "unusable": lambda check, message, of="": f"{of}{check}: {message}",
    "without_latencies": lambda requests, all: f"only {requests:,} of {all:,} requests have latencies",
    "rejected": lambda rejected, all, of="": (
        f"{of}{rejected} of {all} request records were rejected when they were read (see `inspect`), so what can be "
        "replayed is not the load that was served"
    ),
    "no_number": lambda: "the recording states no latency that is judged",
    "failures_unknown": lambda: "overloaded, and which requests failed is not known, so a replay serves another load",
    "stage_alone": lambda: "overloaded, and a load stage by itself is not judged",
    "too_few_served": lambda: "overloaded, and too few requests were served to judge by",
    "needs_requests": _needs_requests,
    "at_limit": lambda name, requests: f"even {requests:,} requests of this load would not decide {name}",
    "needs_longer_run": lambda requests, least: (
        f"{requests:,} requests are too few for an interval, which takes {least} at least; judge or record more"
        if requests < least
        else "the run is too short for an interval; record a longer one"
    ),
    "needs_again": lambda: "it varies far more over the run than it is away from the limit; record this load again",
    "needs_repeat": lambda: "two runs of one server may differ by as much; give another recording with --repeat",
    "needs_more_runs": lambda: "its recordings differ by as much; give more of them with --repeat",
    "needs_no_event": lambda: (
        "one stretch of the run, such as a stall, decides it and may not come again; record this load once more"
    ),
    "needs_arrivals": lambda: "it depends on when each request came; a recording of the requests would decide",
    "needs_steps": lambda: "its steps lie beyond the fit; calibrate on a step log of another run of this load",
    "needs_fitted_on": lambda release: f"say what {release} was fitted on (fitted_on in the release)",
    "derived": lambda name, how: f"{name} is derived: {how}",
    "saturation": lambda verdict: f"saturation: {words(verdict)}",
    "saturates": _saturates,
    "saturates_alone": lambda from_s: f"the simulated server saturates at {from_s:,.1f} s, the recorded one does not",
    "short_queues_only": lambda: "no queue grows to the end of a stage: every latency can be compared",
    "queues": _queues,
    "shorter_queues": lambda side, total_s, longest_s: (
        f"{_SIDES[side]} has queues that stand or go away again, {total_s:,.1f} s in all; the longest wait is "
        f"{longest_s:,.1f} s"
    ),
    "no_queue": lambda side: f"{_SIDES[side]} does not queue",
    "failures": lambda count, from_s: f"{count:,} requests failed, the first one sent at second {from_s:,.1f}",
    "client_limits": _client_limits,
    "draws": _draws,
    "repeats": _repeats,
    "slo": lambda side, attained: f"{side}: {attainment_line(attained)}",
    "hardware": lambda recorded, release: (
        f"hardware: {recorded}; the coefficients are for {release or 'a GPU that their recordings do not name'}"
    ),
    "other_vllm": lambda recorded, fitted: (
        f"vLLM: {recorded}; the coefficients were fitted on {' and '.join(fitted)}, and steps of another release may "
        "cost otherwise"
    ),
    "other_layers": lambda replayed, fitted: (
        f"layers: replayed as {replayed}; the coefficients were fitted as {' and '.join(fitted)}, and a context costs "
        "what a mean layer attends to"
    ),
    "data_type": lambda recorded: f"data type: {recorded}; the coefficients do not say theirs, and 16 bits are usual",
    "parts": _parts,
    "pace": lambda change, low, high: (
        f"pace: at equal batches the server's steps take {step_times(change, low, high, '95 %')}; "
        "--replay pace=recorded replays that pace"
    ),
    "trend": _trend,
    "predicted": _predicted,
    "skill": _skill,
    "warm_up": _warm_up,
    "extrapolated": lambda what: f"extrapolated: {what}",
    "fit_range_unknown": lambda release: (
        f"extrapolated: not known; {release} does not say which steps it was fitted on"
    ),
    "not_recorded": _not_recorded,
    "sources_disagree": lambda what: f"sources disagree: {what}",
    "scheduler": lambda what: f"scheduler: {what}",
    "left_out": lambda requests, why="": f"left out: {counted(requests, 'request')}{why and f' {why}'}",
    "rejected_records": lambda loss: f"left out: {loss}",
    "checks": _checks,
    "basis": lambda what, how: f"{what}: {how}",
    "schedule": lambda sentence: f"schedule: {sentence}",
    "not_simulated": lambda what: f"not simulated: {what}",
    "known_difference": lambda what: f"known difference: {what}",
    "missing": lambda metric, statistics, lacks, why: (
        f"{METRIC_NAMES[metric]} {', '.join(statistics)} not {lacks}: {why}"
    ),
}
