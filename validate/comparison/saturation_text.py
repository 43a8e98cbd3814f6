"""What there is to say of a saturated recording or replay, in words and as JSON."""

from __future__ import annotations

from blis_replay.ingest.checks.overload import Queue, overloaded
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.tables import Toned
from blis_replay.validate.comparison.saturation import Saturation
from blis_replay.validate.text.answer import Block, Line
from blis_replay.validate.text.cells import percent


def saturation_block(found: Saturation) -> Block:
    """The verdict, and below it what it rests on."""
    verdict, *reasons = saturation_sentences(found)
    first = Line(f"saturation: {verdict}", mark=Toned("saturation:", "caution"))
    return Block([first, *(f"- {reason}" for reason in reasons)])


def saturation_sentences(found: Saturation) -> list[str]:
    """The verdict, and then what it rests on."""
    return [_verdict(found), *_queues(found), *_failures(found), *_judged_by(found), *_limits(found)]


def saturation_json(found: Saturation) -> dict[str, object]:
    """Times in s of the recording, errors as fractions."""
    return {
        "explains": found.explains,
        "meaningless_from_s": _s(found.from_us),
        "meaningless_until_s": _s(found.until_us),
        "in_flight": found.in_flight,
        "observed": _queue_json(found.observed),
        "simulated": _queue_json(found.simulated),
        "client_limits": [
            {"stage": limit.stage, "in_flight": limit.in_flight, "from_s": _s(limit.from_us)}
            for limit in found.client_limits
        ],
        "failed": found.failed,
        "first_failure_s": _s(found.first_failure_us),
        "requests_outside": found.requests_outside,
        "error_outside": found.outside,
        "throughput_error": found.throughput_error,
        "offered_per_served": None if found.served is None else found.served.offered,
    }


def overload_sentence(recording: Recording) -> str:
    """What is said beside the latencies of an overloaded recording; empty for any other."""
    is_overloaded, reason = overloaded(recording)
    queue = "its latencies measure how long the queue has grown"
    return f"{recording.alias} is overloaded: {reason}; {queue}" if is_overloaded else ""


def _verdict(found: Saturation) -> str:
    if found.from_us is None:
        return "short queues only: every latency can be compared"
    who = "server" if found.observed.from_us is not None else "simulated server"
    begun = f"{found.from_us / 1e6:,.1f} s"
    if found.until_us is None:
        where = f"the {who} saturates at {begun}; latencies after that are not comparable"
    else:
        until = f"{found.until_us / 1e6:,.1f} s"
        where = f"the {who} is saturated from {begun} to {until}; latencies between are not comparable"
    cause = {
        "recording": "elsewhere the simulator is within its limits",
        "simulator": "the simulator is off by more than the queue explains",
        "not told": "too little was served elsewhere to judge the simulator",
        "neither": "",
    }[found.explains]
    return f"{where}; {cause}" if cause else where


def _queues(found: Saturation) -> list[str]:
    sides = [("the recording", found.observed), ("the replay", found.simulated)]
    lines = []
    for name, side in sides:
        if side.from_us is not None:
            flight = f", with {found.in_flight:,} requests in flight" if side is found.observed else ""
            lines.append(
                f"{name} queues from {side.from_us / 1e6:,.1f} s on{flight}; "
                f"the longest wait is {side.longest_us / 1e6:,.1f} s"
            )
        elif side.touched_us:
            lines.append(
                f"{name} has shorter queues, {side.touched_us / 1e6:,.1f} s in all, that go away again; the longest "
                f"wait is {side.longest_us / 1e6:,.1f} s"
            )
        elif found.from_us is not None:
            lines.append(f"{name} does not queue")
    return lines


def _failures(found: Saturation) -> list[str]:
    if not found.failed or found.first_failure_us is None:
        return []
    return [f"{found.failed:,} requests failed, the first one sent at second {found.first_failure_us / 1e6:,.1f}"]


def _judged_by(found: Saturation) -> list[str]:
    lines = []
    if found.outside["e2e"] is not None:
        errors = f"E2E {percent(found.outside['e2e'])}, TTFT {percent(found.outside['ttft'])}"
        where = "before that" if found.until_us is None else "before and after that"
        lines.append(f"{where}, over {found.requests_outside:,} requests, the errors of the mean are {errors}")
    if found.served is not None:
        lines.append(
            f"while the recorded queue grows, the error of the throughput is {percent(found.throughput_error)}; demand "
            f"was {found.served.offered:.2f} times what the server delivered"
        )
        lines += _slopes(found)
    return lines


def _slopes(found: Saturation) -> list[str]:
    """How fast the wait grows: small errors of what is served make large ones of it, so it is not judged."""
    slopes = [side.growth for side in (found.observed, found.simulated)]
    if None in slopes:
        return []
    recorded, simulated = slopes
    return [f"the wait grows by {recorded:.2f} s per second in the recording, by {simulated:.2f} s in the replay"]


def _limits(found: Saturation) -> list[str]:
    held = [
        ("" if limit.stage is None else f"in stage {limit.stage}, ")
        + f"from second {limit.from_us / 1e6:,.1f} on, {limit.in_flight:,}"
        for limit in found.client_limits
    ]
    if not held:
        return []
    return [
        f"the client held its requests in flight at a limit ({'; '.join(held)}): it sent one when another was done. "
        "Its arrivals carry the server's speed, so a slower simulator builds a queue that this client would not have "
        "built, and a faster one idles"
    ]


def _queue_json(side: Queue) -> dict[str, float | None]:
    return {
        "from_s": _s(side.from_us),
        "until_s": _s(side.until_us),
        "longest_wait_s": side.longest_us / 1e6,
        "shorter_queues_s": side.touched_us / 1e6,
    }


def _s(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1e6
