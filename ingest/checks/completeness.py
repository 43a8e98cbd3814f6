"""Check 8: failures, missing fields, duplicates, rejected records."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured
from blis_replay.ingest.checks.ledger import ends_early, lost
from blis_replay.ingest.overload import overloaded
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.served import away, completed_requests, failed_requests, recorded_requests

CHECK = "completeness"
MEASURES = "what the recording lacks or lost: rejected records, failures, missing fields, duplicates"
RULE = "every request needs arrival, lengths, TTFT and E2E, once; whatever is lost biases what is left"
_FEWEST_COPIES = 5  # requests
_LOST = "what can be replayed is not the load that was served"
# Kinds of files without requests: what they lack is counted by other checks.
_OF_SERVER = frozenset(("otlp", "server log", "step-log", "metrics"))
# What must not be used of a file of the server, none of whose records could be read.
_RESTS_ON = {"otlp": "segments", "step-log": "step_time"}
_NEEDED = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us")


def check(recording: Recording, context: Context) -> list[Finding]:
    """What the recording lacks or lost, a finding each; one note if nothing is amiss."""
    findings = [
        *_rejected(recording),
        *_failures(recording),
        *_away(recording),
        *_aborted(recording),
        *_missing_fields(recording),
        *_beyond_model_length(recording),
        *_duplicates(recording),
        *_copies(recording),
        *_ended_early(recording),
    ]
    return findings or [_complete(recording)]


def _complete(recording: Recording) -> Finding:
    requests = recorded_requests(recording)
    if requests.is_empty():
        return Finding(CHECK, "note", "", f"no recorded requests, only {recording.ground_truth}")
    message = f"all {requests.height} requests completed, none lacks a field or was rejected"
    return Finding(CHECK, "note", "", message, {"requests": requests.height})


def _rejected(recording: Recording) -> Iterator[Finding]:
    for file in recording.files:
        if not file.rejected_count:
            continue
        measured: Measured = {"file": file.name, "rejected": file.rejected_count, "records": file.records}
        lost = file.is_cut_off and file.kind not in _OF_SERVER
        metric = "" if file.records else _RESTS_ON.get(file.kind, "")
        message = file.loss() + (f"; {_LOST}: copy the file again, whole" if lost else "")
        message += "; nothing of it is used: copy the file again, whole" if metric else ""
        rule = "any rejected record; of requests that end with their file nothing is judged"
        yield Finding(CHECK, "unusable" if lost or metric else "note", metric, message, measured, rule)


def _failures(recording: Recording) -> list[Finding]:
    requests = recorded_requests(recording)
    failed = failed_requests(requests).frame(["status", "prompt_tokens"])
    count = failed.height - sum(stretch.requests for stretch in away(recording))
    if not count:
        return []
    timeouts = failed.filter(pl.col("status") == "timeout").height
    share = count / requests.height
    no_prompt = failed["prompt_tokens"].null_count()
    message = (
        f"{count} of {requests.height} requests failed ({100 * share:.1f} %), {timeouts} of them by time-out; "
        "metrics are over the others, which the failures bias towards the quick ones"
    )
    most = 2 * count > requests.height and not overloaded(recording)[0]
    message += "; more failed than were answered, without a queue: find out why, and record again" if most else ""
    if no_prompt:
        message += f"; {no_prompt} lost their prompt length"
    measured: Measured = {
        "failed": count,
        "timeouts": timeouts,
        "requests": requests.height,
        "share": share,
        "without_prompt_length": no_prompt,
    }
    rule = "any failed request; nothing is judged where most fail without an overload"
    return [Finding(CHECK, "unusable" if most else "note", "", message, measured, rule)]


def _away(recording: Recording) -> Iterator[Finding]:
    for stretch in away(recording):
        from_s, until_s = stretch.from_us / 1e6, stretch.until_us / 1e6
        message = (
            f"no server was there for {stretch.requests:,} requests, sent from second {from_s:.1f} to {until_s:.1f}: "
            "each was refused at once, or has no answer behind the last one of the run, and nothing was answered "
            "meanwhile; the others are judged, and where the server started again its caches were empty"
        )
        measured: Measured = {"requests": stretch.requests, "from_s": from_s, "until_s": until_s}
        rule = "five or more in a row fail quicker than any first token, or behind the last answer; none is in flight"
        yield Finding(CHECK, "note", "", message, measured, rule)


def _aborted(recording: Recording) -> list[Finding]:
    requests = recorded_requests(recording)
    aborted = int((requests["status"] == "aborted").sum())
    if not aborted:
        return []
    message = (
        f"the client itself gave up {aborted} of {requests.height} requests (the end of the run, or as asked to); "
        "they do not count as failures, and metrics are over the completed ones"
    )
    measured: Measured = {"aborted": aborted, "requests": requests.height}
    return [Finding(CHECK, "note", "", message, measured, "any request that the client gave up")]


def _missing_fields(recording: Recording) -> list[Finding]:
    requests = completed_requests(recording, *_NEEDED)
    lacking: Measured = {name: requests[name].null_count() for name in _NEEDED if requests[name].null_count()}
    if not lacking:
        return []
    listed = ", ".join(f"{name} of {count}" for name, count in lacking.items())
    message = f"of {requests.height} completed requests some lack a field: {listed}"
    return [Finding(CHECK, "note", "", message, lacking, "any completed request without one of " + ", ".join(_NEEDED))]


def _beyond_model_length(recording: Recording) -> list[Finding]:
    limit_tokens = recording.argument("max_model_len")
    if limit_tokens is None:
        return []
    length = pl.col("prompt_tokens") + pl.col("output_tokens")
    longer = completed_requests(recording, "prompt_tokens", "output_tokens").filter(length > limit_tokens)
    if longer.is_empty():
        return []
    message = (
        f"{longer.height} completed requests have more tokens than max_model_len ({limit_tokens:,}), up to "
        f"{longer.select(length.max()).item():,}; such a server serves none, so the argument or the lengths are wrong"
    )
    measured: Measured = {"requests": longer.height, "max_model_len": limit_tokens}
    return [Finding(CHECK, "note", "", message, measured, "prompt and output tokens must fit into max_model_len")]


def _duplicates(recording: Recording) -> list[Finding]:
    named = recorded_requests(recording).where("request_id IS NOT NULL")
    counts = named.aggregate(ids="count(*)", distinct_ids="count(DISTINCT request_id)")
    repeated = counts["ids"] - counts["distinct_ids"]
    if not repeated:
        return []
    ids = named["request_id"]
    again = ids.filter(ids.is_duplicated())
    message = f"{repeated} requests repeat the id of another, first {again[0]}; each is kept"
    doubled = repeated > lost(counts["ids"])
    if doubled:
        message += ", and what is replayed is more than was served"
    rule = "any request id that occurs twice; with 1 % of them nothing is judged"
    return [Finding(CHECK, "unusable" if doubled else "note", "", message, {"repeated": repeated}, rule)]


# Stamps that are all whole milliseconds can be alike by chance.
_TO_TELL_APART_US = 1_000


def _copies(recording: Recording) -> list[Finding]:
    """Requests that were sent and answered in the same microseconds as another: records that were read twice."""
    stamps = recorded_requests(recording).select("arrival_us", "ttft_us", "e2e_us").drop_nulls()
    if stamps.height < _FEWEST_COPIES or all((stamps[name] % _TO_TELL_APART_US == 0).all() for name in stamps.columns):
        return []
    # Only what was sent at one time can be copies: few, where all would be many.
    at_once = stamps.filter(pl.col("arrival_us").is_duplicated())
    copies = at_once.height - at_once.unique().height
    if copies <= lost(stamps.height):
        return []
    message = (
        f"{copies} of {stamps.height} requests have send, first token and end of another, to the microsecond: the same "
        "records twice; what is replayed is more than was served"
    )
    rule = "more than 1 % of requests with all three stamps of another, where stamps are finer than a millisecond"
    return [Finding(CHECK, "unusable", "", message, {"copies": copies, "requests": stamps.height}, rule)]


def _ended_early(recording: Recording) -> list[Finding]:
    """A last load stage that was stopped, or whose records are cut off."""
    early = ends_early(recording)
    if early is None:
        return []
    stage, share = early
    message = (
        f"load stage {stage.stage} announces {stage.duration_us / 1e6:.0f} s, and its last request was sent after "
        f"{share * stage.duration_us / 1e6:.1f} s: the run was stopped, or its records are cut off"
    )
    return [Finding(CHECK, "note", "", message, {"stage": stage.stage, "share": share}, "sends go on for 90 % of it")]
