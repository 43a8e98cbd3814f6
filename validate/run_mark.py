"""What tells a run whoever recorded it: a client, the server's log and its counters share no latency of a request."""

from __future__ import annotations

from blis_replay.blis.releases.release import RunMark
from blis_replay.ingest.recording import NOT_KNOWN, Recording

# Files that a server writes; its counters are of all that it ever served.
_OF_SERVER = ("otlp", "server log", "step-log")
_AS_MANY = 0.05  # requests of a run that a client leaves out as warm-up, as a share
_TOGETHER = 0.01  # share of a run in which another ran; less is a pause between two that is not one


def run_mark(recording: Recording) -> RunMark:
    """When its requests were sent, and what its server wrote of them."""
    placed = (c for c in recording.clocks if c.kind == "epoch" and not c.constructed and c.placed != NOT_KNOWN)
    clock, arrival_us = next(placed, None), recording.requests["arrival_us"].to_numpy()
    sent_us = None
    if clock is not None and len(arrival_us):
        sent_us = int(arrival_us.min()) + clock.zero_us, int(arrival_us.max()) + clock.zero_us
    written = tuple(sorted(file.sha256 for file in recording.files if file.kind in _OF_SERVER))
    return RunMark(len(arrival_us), recording.model, sent_us, written)


def same_run(one: RunMark, other: RunMark) -> bool:
    """Whether two recordings may be of one run: of one model at one time, or as many requests in one server's file.

    A server's log may be of several loads, so a shared one says nothing where clocks do.
    """
    if None not in (one.model, other.model) and one.model != other.model:
        return False
    if one.sent_us is None or other.sent_us is None:
        as_many = abs(one.requests - other.requests) <= _AS_MANY * one.requests
        return as_many and not {*one.server_files}.isdisjoint(other.server_files)
    together_us = min(one.sent_us[1], other.sent_us[1]) - max(one.sent_us[0], other.sent_us[0])
    return together_us > _TOGETHER * min(last_us - first_us for first_us, last_us in (one.sent_us, other.sent_us))
