"""Check 8: failures, missing fields, duplicates, rejected records, counts against published ones."""

from __future__ import annotations

import numpy as np
import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.served import (
    by_arrival,
    completed_requests,
    failed_count,
    failed_requests,
    published,
    recorded_requests,
)
from blis_replay.ingest.tables import Table, columns_named

CHECK = "completeness"
MEASURES = "what the recording lacks or lost: rejected records, failures, missing fields, duplicates, published counts"
RULE = "every request needs arrival, lengths, TTFT and E2E, once; whatever is lost biases what is left"
MOST_LOST = 0.01  # share of requests; without more of them the queue is a different one
_FEWEST_LOST = 5  # requests; fewer are a recorder's hiccup
_LOST = "what can be replayed is not the load that was served"
_PAUSES = 5  # mean gaps between requests; after a longer pause another run begins
_COUNTS_RULE = "the two counts must be equal; with 1 % fewer records nothing is judged"
# Kinds of files without requests: what they lack is counted by other checks.
_OF_SERVER = frozenset(("otlp", "server log", "step-log", "metrics", "forward-passes"))
_NEEDED = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us")


def check(recording: Recording, context: Context) -> list[Finding]:
    """What the recording lacks or lost, a finding each; one note if nothing is amiss."""
    findings = [
        *_rejected(recording),
        *_failures(recording),
        *_aborted(recording),
        *_missing_fields(recording),
        *_beyond_model_length(recording),
        *_duplicates(recording),
        *_copies(recording),
        *_published_counts(recording),
        *_journeys_of_nobody(recording),
        *_journeys_after_the_end(recording),
        *_fewer_than_announced(recording),
        *_numbers_left_out(recording),
        *_beats_left_out(recording),
    ]
    return findings or [_complete(recording)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """How many requests ended how, and how many completed ones lack a field; records rejected by file."""
    requests = recorded_requests(recording)
    ended = requests["status"].fill_null("not recorded").value_counts(sort=True).iter_rows()
    completed = completed_requests(recording, *_NEEDED)
    lacking = tuple((name, completed[name].null_count()) for name in _NEEDED) if completed.height else ()
    rejected = tuple((file.name, file.records, file.rejected_count) for file in recording.files)
    return (
        Table("how requests ended", columns_named("status", "requests"), tuple(ended), bars="requests"),
        Table("completed requests without a field", columns_named("field", "requests"), lacking),
        Table("records by file", columns_named("file", "read", "rejected"), rejected),
    )


def _complete(recording: Recording) -> Finding:
    requests = recorded_requests(recording)
    if requests.is_empty():
        return Finding(CHECK, "note", "", f"no recorded requests, only {recording.ground_truth}")
    message = f"all {requests.height} requests completed, none lacks a field or was rejected"
    if not is_counted(recording):
        message += "; requests missing from the client's file would not show: nothing else counts them"
    return Finding(CHECK, "note", "", message, {"requests": requests.height})


def _rejected(recording: Recording) -> list[Finding]:
    findings = []
    for file in recording.files:
        if not file.rejected_count:
            continue
        measured: Measured = {"file": file.name, "rejected": file.rejected_count, "records": file.records}
        lost = file.is_cut_off and file.kind not in _OF_SERVER
        message = file.loss() + (f"; {_LOST}: copy the file again, whole" if lost else "")
        rule = "any rejected record; of requests that end with their file nothing is judged"
        findings.append(Finding(CHECK, "unusable" if lost else "note", "", message, measured, rule))
    return findings


def _failures(recording: Recording) -> list[Finding]:
    requests = recorded_requests(recording)
    failed = failed_requests(requests).frame(["status", "prompt_tokens"])
    if failed.is_empty():
        return []
    timeouts = failed.filter(pl.col("status") == "timeout").height
    share = failed.height / requests.height
    no_prompt = failed["prompt_tokens"].null_count()
    message = (
        f"{failed.height} of {requests.height} requests failed ({100 * share:.1f} %), {timeouts} of them by time-out; "
        "metrics are over the others, which the failures bias towards the quick ones"
    )
    if no_prompt:
        message += f"; {no_prompt} lost their prompt length"
    measured: Measured = {
        "failed": failed.height,
        "timeouts": timeouts,
        "requests": requests.height,
        "share": share,
        "without_prompt_length": no_prompt,
    }
    return [Finding(CHECK, "note", "", message, measured, "any failed request")]


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
    setting = recording.engine.get("max_model_len")
    if setting is None:
        return []
    limit_tokens = int(setting.value)
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
    doubled = _is_much(repeated, counts["ids"])
    if doubled:
        message += ", and what is replayed is more than was served"
    rule = "any request id that occurs twice; with 1 % of them nothing is judged"
    return [Finding(CHECK, "unusable" if doubled else "note", "", message, {"repeated": repeated}, rule)]


# Stamps that are all whole milliseconds can be alike by chance.
_TO_TELL_APART_US = 1_000


def _copies(recording: Recording) -> list[Finding]:
    """Requests that were sent and answered in the same microseconds as another: records that were read twice."""
    stamps = recorded_requests(recording).select("arrival_us", "ttft_us", "e2e_us").drop_nulls()
    if stamps.height < _FEWEST_LOST or all((stamps[name] % _TO_TELL_APART_US == 0).all() for name in stamps.columns):
        return []
    # Only what was sent at one time can be copies: few, where all would be many.
    at_once = stamps.filter(pl.col("arrival_us").is_duplicated())
    copies = at_once.height - at_once.unique().height
    if not _is_much(copies, stamps.height):
        return []
    message = (
        f"{copies} of {stamps.height} requests have send, first token and end of another, to the microsecond: the same "
        "records twice; what is replayed is more than was served"
    )
    rule = "more than 1 % of requests with all three stamps of another, where stamps are finer than a millisecond"
    return [Finding(CHECK, "unusable", "", message, {"copies": copies, "requests": stamps.height}, rule)]


def _published_counts(recording: Recording) -> list[Finding]:
    requests = recorded_requests(recording)
    if requests.is_empty():
        return []
    succeeded = int((requests["status"] == "ok").sum())
    findings = []
    counts = {"sent": requests.height, "failed": failed_count(requests), "succeeded": succeeded}
    for statistic, counted in counts.items():
        count = published(recording.aggregates, -1, "requests", statistic)
        if count is not None and int(count) != counted:
            message = f"the published report counts {int(count)} requests {statistic}, the records {counted}"
            measured: Measured = {"published": int(count), "recorded": counted}
            lost = int(count) - counted > MOST_LOST * int(count) and statistic != "failed"
            said = f"{message}; {_LOST}" if lost else message
            findings.append(Finding(CHECK, "unusable" if lost else "note", "", said, measured, _COUNTS_RULE))
    return findings


def _is_much(count: float, of: float) -> bool:
    """Whether ``count`` requests more or less, ``of`` all, make it a different load."""
    return count > max(MOST_LOST * of, _FEWEST_LOST)


def _journeys_of_nobody(recording: Recording) -> list[Finding]:
    """Journeys of the server within the run that belong to no request of the client, where others do."""
    requests = recorded_requests(recording)
    if requests.is_empty() or recording.lifecycles.is_empty():
        return []
    journeys = recording.lifecycles.frame(["request_index", "arrived_us"]).drop_nulls("arrived_us")
    last_us = int(requests["arrival_us"].max() or 0)  # type: ignore[arg-type]
    within = journeys.filter(pl.col("arrived_us").is_between(0, last_us))
    nobodys = within["request_index"].null_count()
    if nobodys == 0 or nobodys == within.height:
        return []
    lost = _is_much(nobodys, requests.height)
    message = f"{nobodys} of {within.height} server journeys during the run belong to no request of the client"
    measured: Measured = {"without_request": nobodys, "journeys": within.height, "requests": requests.height}
    rule = "at most 1 % of the requests, or 5: warm-up requests and probes have journeys too"
    said = f"{message}; {_LOST}" if lost else message
    return [Finding(CHECK, "unusable" if lost else "note", "", said, measured, rule)]


def _journeys_after_the_end(recording: Recording) -> list[Finding]:
    """Journeys that go on where the client's records end, without a pause: its file was cut off."""
    requests = recorded_requests(recording)
    if requests.height < _FEWEST_LOST or recording.lifecycles.is_empty():
        return []
    journeys = recording.lifecycles.frame(["request_index", "arrived_us"]).drop_nulls("arrived_us")
    sends_us = requests["arrival_us"]
    last_us = int(sends_us.max() or 0)  # type: ignore[arg-type]
    pause_us = _PAUSES * last_us / requests.height
    after = journeys.filter(pl.col("request_index").is_null() & (pl.col("arrived_us") > last_us)).sort("arrived_us")
    if journeys["request_index"].null_count() == journeys.height or after.is_empty():
        return []
    gaps_us = after["arrived_us"].diff().fill_null(int(after["arrived_us"][0]) - last_us)
    goes_on = int((gaps_us <= pause_us).cum_min().sum())
    if not _is_much(goes_on, requests.height):
        return []
    message = (
        f"the client's records end at {last_us / 1e6:.1f} s, and the server went on with {goes_on} requests without a "
        f"pause: the records are cut off, and {_LOST}"
    )
    measured: Measured = {"after_the_end": goes_on, "requests": requests.height}
    rule = f"requests that follow each other within {_PAUSES} mean gaps of the client's; more than 1 %, or 5"
    return [Finding(CHECK, "unusable", "", message, measured, rule)]


def is_counted(recording: Recording) -> bool:
    """Whether anything but the client's list of requests says how many there were."""
    return (
        bool(recording.stages)
        or not recording.steps.is_empty()
        or not recording.lifecycles.is_empty()
        or not recording.aggregates.is_empty()
        or _numbers(recorded_requests(recording)["request_id"]) is not None
    )


_FAR_BELOW = 3.0  # standard deviations of a Poisson count; a larger deficit is not chance
_ENDS_EARLY = 0.9  # share of the last stage that its sends cover in a complete run
_MOST_NUMBERS_LEFT_OUT = 0.4  # share of the numbers in ids; with more gaps they do not count requests
_IN_ORDER = 0.95  # share of ids whose numbers rise with the sends
# Sends at a constant rate:
_ONE_PERIOD = 0.6  # at least this share of the gaps is one period
_WHOLE_PERIODS = 0.95  # at least this share is a whole number of periods,
_JITTER = 0.05  # to this share of a period
_LONGEST_HOLE = 10  # periods; a longer gap is a pause


def _fewer_than_announced(recording: Recording) -> list[Finding]:
    """Fewer requests than the load stages announce; the end of the last one may never have been sent."""
    sent = recorded_requests(recording).frame(["stage", "arrival_us"]).drop_nulls()
    stages = sorted(recording.stages, key=lambda stage: stage.stage)
    known = [stage for stage in stages if (sent["stage"] == stage.stage).any()]
    if sent.height < _FEWEST_LOST or not known:
        return []
    last, findings = known[-1], []
    at_us = sent.filter(pl.col("stage") == last.stage)["arrival_us"].to_numpy()
    share = min((at_us.max() - at_us.min()) / last.duration_us, 1.0)
    cut_off = share < _ENDS_EARLY and stages[-1] is last
    wanted = sum(stage.rate_per_s * stage.duration_us / 1e6 for stage in known)
    if cut_off:
        rest = (1 - share) * last.rate_per_s * last.duration_us / 1e6
        wanted -= rest
        message = (
            f"load stage {last.stage} announces {last.duration_us / 1e6:.0f} s, and its last request was sent after "
            f"{share * last.duration_us / 1e6:.1f} s: the run was stopped, or its records are cut off"
        )
        measured: Measured = {"announced": wanted + rest, "recorded": sent.height, "stage": last.stage}
        findings.append(Finding(CHECK, "note", "", message, measured, "sends go on for 90 % of the last stage"))
    if wanted - sent.height > max(_FAR_BELOW * wanted**0.5, MOST_LOST * wanted, _FEWEST_LOST):
        message = f"the load stages announce {wanted:.0f} requests, and {sent.height} are recorded: {_LOST}"
        rule = f"rate times duration; fewer by {_FAR_BELOW:g} standard deviations of a Poisson count, and by 1 %"
        measured = {"announced": wanted, "recorded": sent.height}
        findings.append(Finding(CHECK, "unusable", "", message, measured, rule))
    return findings


_NUMBER_AT_END = "[0-9]{1,9}$"


def _numbers(ids: pl.Series) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """The numbers at the end of ids that count the requests in order of sending; None where they do not."""
    if len(ids) < 20 or ids.null_count():
        return None
    ends = ids.str.extract(f"({_NUMBER_AT_END})")
    if ends.null_count() or ids.str.replace(_NUMBER_AT_END, "").n_unique() > 1:
        return None
    numbers = ends.cast(pl.Int64).to_numpy()
    in_order = (np.diff(numbers) > 0).mean() >= _IN_ORDER and len(np.unique(numbers)) == len(numbers)
    span = int(numbers.max() - numbers.min()) + 1
    return numbers if in_order and span - len(numbers) <= _MOST_NUMBERS_LEFT_OUT * span else None


def _numbers_left_out(recording: Recording) -> list[Finding]:
    """Ids that count the requests, with gaps."""
    numbers = _numbers(recorded_requests(recording)["request_id"])
    if numbers is None:
        return []
    span = int(numbers.max() - numbers.min()) + 1
    lacking = span - len(numbers)
    if not _is_much(lacking, span):
        return []
    message = (
        f"ids count from {numbers.min()} to {numbers.max()}, and {lacking} of these {span} requests are not recorded: "
        f"{_LOST}"
    )
    rule = "numbers at the end of ids that rise with the sends, at most 40 % of them left out; more than 1 %, or 5"
    return [Finding(CHECK, "unusable", "", message, {"left_out": lacking, "numbers": span}, rule)]


def _beats_left_out(recording: Recording) -> list[Finding]:
    """Sends at a constant rate, with holes of whole periods."""
    sent = by_arrival(recorded_requests(recording).frame(["stage", "arrival_us"]).drop_nulls("arrival_us"))
    holes, beats = 0, 0
    for _, stage in sent.group_by("stage", maintain_order=True):
        gaps_us = stage["arrival_us"].diff().drop_nulls().to_numpy().astype(np.float64)
        period_us = float(np.median(gaps_us)) if len(gaps_us) >= 20 else 0.0
        if period_us <= 0:
            continue
        periods = gaps_us / period_us
        whole = (np.abs(periods - np.rint(periods)) <= _JITTER) & (np.rint(periods) >= 1)
        if whole.mean() < _WHOLE_PERIODS or (np.rint(periods) == 1).mean() < _ONE_PERIOD:
            continue
        skipped = np.rint(periods[whole & (periods <= _LONGEST_HOLE)]) - 1
        holes, beats = holes + int(skipped.sum()), beats + len(gaps_us) + 1
    if not _is_much(holes, beats + holes):
        return []
    message = f"requests are sent at a constant rate, and {holes} of {beats + holes} sends are left out: {_LOST}"
    rule = "95 % of the gaps between sends are whole periods, 60 % are one; more than 1 % of the beats left out, or 5"
    return [Finding(CHECK, "unusable", "", message, {"left_out": holes, "beats": beats + holes}, rule)]
