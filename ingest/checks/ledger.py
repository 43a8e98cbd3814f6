"""The ledger: what each source counts of requests, tokens, steps and time, and which of them contradict each other.

A source states a number and bounds: between them lies the truth of the client's run if the source is right.  Two
sources whose bounds do not meet contradict each other.  That is the one rule, for more and for fewer alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import counted
from blis_replay.ingest.checks.evidence import Context, Measured, Window, named, stage_windows, steps_in
from blis_replay.ingest.recording import BY_CLIENT, NOT_KNOWN, RETOKENISED, Finding, Recording, Stage
from blis_replay.ingest.served import by_arrival, completed_requests, published, recorded_requests
from blis_replay.ingest.steps.records import steps_by_id
from blis_replay.ingest.steps.timeline import step_anchors
from blis_replay.ingest.tables import Cell, Table, columns_named

CHECK = "ledger"
MEASURES = "requests, tokens, steps and time by every source that counts them, and where sources contradict each other"
RULE = (
    "each source bounds the truth of the client's run; bounds that do not meet are a contradiction.  If the server's "
    "other sources agree with the client, what rests on the odd one is unusable; else nothing is judged"
)

SENT, COMPLETED = "requests sent", "requests completed"
PROMPT = "prompt tokens"
DECODED = "decoded tokens"  # output tokens after the first of each request
HITS, PREEMPTIONS = "prefix hits", "preemptions"
STEPS, SPAN = "engine steps", "time span"
IN_FLIGHT = "requests in flight"  # on average, when the recorded steps began

CLIENT, REPORT = "client's requests", "client's report"
STAGES, IDS, BEAT = "load stages", "numbers in ids", "constant rate"
JOURNEYS, METRICS, LOG, STEP_RECORDS = "server's journeys", "/metrics", "server log", "step records"
COUNTERS = "step log counters"
OF_SERVER = (JOURNEYS, METRICS, LOG, STEP_RECORDS)
# What must not be used if a source is wrong, as the metric of a finding.
_RESTS_ON = {JOURNEYS: "segments", STEP_RECORDS: "step_time"}
_REMEDY = {
    JOURNEYS: "take the traces of this run, or leave them out",
    METRICS: "take the snapshots right before and after the run, of every server that served it, or leave them out",
    LOG: "take the server log of this run, or leave it out",
    STEP_RECORDS: "take the step records of this run, all of them, or leave them out",
    **dict.fromkeys((REPORT, STAGES, IDS, BEAT), "copy the client's file again, whole"),
}

# Tolerances.  Warm-up requests and other clients are few; a chat template and a begin-of-text token are a token or two
# per request; asynchronous scheduling counts one token per request in the wrong step.
LOST = 0.01  # share of requests that a client's file may lack
FEW_LOST = 5  # requests; fewer are a recorder's hiccup
OTHERS = 0.05  # share of requests of other clients
FEW_OTHERS = 10  # requests that may warm the server up
_TOKENS = 0.05  # share of tokens
_TOKENS_EACH = 2  # per request
# Requests beyond the client's are warm-ups if they are a whole number per client; with fewer clients that is chance.
_FEWEST_CLIENTS, _MOST_WARM_UPS = 4, 4
_LONG_WARM_UP = 4  # times the mean length, of a request of another client
_DISTINCT_US = 1_000_000  # between time spans: clocks of two hosts
# A request is in flight before the engine has it, and after.  The engine of a sound recording has 0 to 8 % less
# (synthetic servers, the H100 runs); it has more only if its clock is off.
_MORE_IN_ENGINE, _LESS_IN_ENGINE = 1.05, 0.9
_NO_DEPTH = 0.01  # requests; a lower mean counts as zero
_ON_THE_WAY = 0.5  # requests on their way; seen: 0.4 of 1.9 where each has three tokens
_FEWEST_IN_FLIGHT = 30  # steps and requests, from which their means are compared
_NEARLY_ALL = 0.9  # share of the requests whose journeys are known, from which these say how many are in the engine
_NOISE = 4.5  # standard errors of a random draw of steps
_HELD = 0.9  # share of the decoded tokens; step records with fewer are not those of the whole run
_SHORT_OF_BLOCKS = 0.95  # of the KV cache; below it nothing is preempted
_PAUSES = 5  # mean gaps between requests; after a longer pause another run begins
_POISSON = 3.0  # standard deviations of a Poisson count


@dataclass(frozen=True)
class Entry:
    """What one source states of one quantity: ``value``, or a span of time; ``low`` to ``high``: its bounds.

    ``covers``: the requests or steps it is about, in words.  ``in_bounds``: a source that states the bounds alone: it
    can contradict another, and confirms none.
    """

    quantity: str
    source: str
    value: float
    low: float
    high: float
    covers: str = "the run"
    in_bounds: bool = False

    def contradicts(self, other: Entry) -> bool:
        return self.low > other.high or other.low > self.high

    @property
    def is_bounded(self) -> bool:
        """Whether it can confirm another: a bound on one side alone agrees with almost anything."""
        return self.low > 0 and self.high < math.inf and not self.in_bounds

    def stated(self) -> str:
        """In words: a count, or seconds of a span."""
        if self.quantity == SPAN:
            return f"{self.low / 1e6:.1f} to {self.high / 1e6:.1f} s"
        if self.in_bounds:
            return f"{self.low:,.0f} to {self.high:,.0f}" if self.high < math.inf else f"{self.low:,.0f} or more"
        return f"{self.value:,.1f}" if self.quantity == IN_FLIGHT else f"{self.value:,.0f}"


def _within(quantity: str, source: str, value: float, tolerance: float, covers: str = "the run") -> Entry:
    return Entry(quantity, source, value, value - tolerance, value + tolerance, covers)


def lost(requests: float) -> float:
    """How many of ``requests`` a file may lack before what is left is another load."""
    return max(LOST * requests, FEW_LOST)


def entries(recording: Recording) -> tuple[Entry, ...]:
    """All statements, by quantity; within one in order of trust, the client's records first."""
    client = {entry.quantity: entry for entry in _of_client(recording)}
    stated = [
        *client.values(),
        *_of_report(recording),
        *_of_sends(recording),
        *_of_journeys(recording, client),
        *_of_metrics(recording, client),
        *_of_steps(recording, client),
        *_of_depth(recording),
        *_of_log(recording, client),
        *_of_throughput(recording, client),
    ]
    order = (SENT, COMPLETED, PROMPT, DECODED, HITS, PREEMPTIONS, STEPS, SPAN, IN_FLIGHT)
    return tuple(sorted(stated, key=lambda entry: order.index(entry.quantity)))


# -- The rule ---------------------------------------------------------------------------------------------------------


def check(recording: Recording, context: Context) -> list[Finding]:
    """A finding for each source that contradicts another, else one note of what agrees; and what cut a part out."""
    of_part = [finding for finding in recording.findings if finding.check == CHECK]
    # Requests of others that are not replayed say why the server's counts differ.
    cut_out = any(finding.severity == "unusable" for finding in of_part)
    return of_part if cut_out else [*_compared(recording), *of_part]


def _compared(recording: Recording) -> list[Finding]:
    stated = entries(recording)
    against: dict[str, list[_Contradiction]] = {}
    agreeing = []
    for quantity, group in groupby(stated, key=lambda entry: entry.quantity):
        first, *others = group
        odd = [entry for entry in others if entry.contradicts(first)]
        beside = [e for e in others if e not in odd and e.source in OF_SERVER and e.is_bounded]
        for entry in odd:
            settled = first.source != CLIENT or len(beside) >= len(odd)
            settled |= entry.source == STEP_RECORDS and entry.quantity != SPAN and _breaks_off(recording)
            against.setdefault(entry.source, []).append(_Contradiction(first, entry, settled))
        if others and not odd:
            agreeing.append(f"{quantity} ({len(others) + 1} sources)")
    stop = {source: found for source, found in against.items() if not all(one.settled for one in found)}
    if against:  # what stops every verdict says why the rest differs
        return [_finding(source, found, recording) for source, found in (stop or against).items()]
    if {entry.source for entry in stated if entry.quantity in (SENT, COMPLETED, PROMPT, DECODED)} == {CLIENT}:
        message = "nothing but the client's file counts its requests, so those missing from it would not show"
        return [Finding(CHECK, "note", "", message, {}, RULE)]
    message = f"sources agree on {', '.join(agreeing)}"
    return [Finding(CHECK, "note", "", message, {}, RULE)] if agreeing else []


@dataclass(frozen=True)
class _Contradiction:
    """A source against the first of its quantity; ``settled``: whether others of the server agree with that one."""

    first: Entry
    odd: Entry
    settled: bool


def _finding(source: str, found: list[_Contradiction], recording: Recording) -> Finding:
    """What the one rule makes of a source that contradicts others."""
    measured: Measured = {}
    for one in found:
        measured |= {f"{one.first.quantity}: {e.source}": e.value or e.low for e in (one.first, one.odd)}
    counts = (f"{one.first.quantity}: {one.odd.stated()} against {one.first.stated()}" for one in found)
    message = f"{source} against {found[0].first.source}: {', '.join(counts)}"
    remedy = _REMEDY.get(source, "")
    if not all(one.settled for one in found):
        if all(one.first.quantity in (PROMPT, DECODED) for one in found):
            remedy = "if its lengths are words, or another tokeniser's tokens, record the usage that the server sends"
            if any(one.odd.in_bounds and one.odd.low > one.first.high for one in found):
                remedy = "the server had other clients; give their requests too, or record a run by itself"
            elif any(one.odd.in_bounds for one in found):
                remedy = "take the log of this run and of every server that served it, or leave it out"
        if source in OF_SERVER and (others := [file.name for file in recording.files if BY_CLIENT in file.kind]):
            remedy = f"requests of {', '.join(others)} are not read: ingest again, {BY_CLIENT}"
        message += f"; what can be replayed is not what was served: {remedy}"
        return Finding(CHECK, "unusable", "", message, measured, RULE)
    message += f"; the former is not used: {remedy}"
    metric = _RESTS_ON.get(source, "")
    return Finding(CHECK, "unusable" if metric else "note", metric, message, measured, RULE)


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """The ledger itself."""
    return (ledger_table(recording),)


def ledger_table(recording: Recording) -> Table:
    """Every statement with what it covers and whether it agrees with the first of its quantity."""
    rows: list[tuple[Cell, ...]] = []
    for quantity, group in groupby(entries(recording), key=lambda entry: entry.quantity):
        first, *others = group
        rows.append((quantity, first.source, first.stated(), first.covers, ""))
        rows += [
            ("", e.source, e.stated(), e.covers, "contradicts" if e.contradicts(first) else "agrees") for e in others
        ]
    columns = columns_named("counted", "source", "states", "covers", "", kind="text")
    note = "decoded tokens: output tokens after the first of each request" if rows else ""
    return Table("ledger of counts", columns, tuple(rows), cut=True, note=note)


# -- The client -------------------------------------------------------------------------------------------------------


def _of_client(recording: Recording) -> Iterator[Entry]:
    requests = recorded_requests(recording)
    sent = requests.height
    if not sent:
        return
    done = completed_requests(
        recording,
        *("arrival_us", "e2e_us", "prompt_tokens", "output_tokens", "output_tokens_source", "cached_prompt_tokens"),
    )
    yield Entry(SENT, CLIENT, sent, sent, sent)
    yield Entry(COMPLETED, CLIENT, done.height, done.height, sent)
    more = sent / max(done.height, 1)  # the server may have worked for failed requests too
    lengths = done["output_tokens"]
    trusted = not lengths.null_count() and not (done["output_tokens_source"] == RETOKENISED).any()
    if done.height and not done["prompt_tokens"].null_count():
        prompts = int(done["prompt_tokens"].sum())
        yield Entry(PROMPT, CLIENT, prompts, prompts, prompts * more)
    if done.height and trusted:
        decoded = int((lengths - 1).clip(0).sum())
        yield Entry(DECODED, CLIENT, decoded, decoded, decoded * more)
    if done.height and not done["cached_prompt_tokens"].null_count():
        hits = int(done["cached_prompt_tokens"].sum())
        yield _within(HITS, CLIENT, hits, 0)
    ends = requests.aggregate(first="min(arrival_us)", last="max(arrival_us + coalesce(e2e_us, 0))")
    if ends["first"] is not None:
        yield Entry(SPAN, CLIENT, 0, float(ends["first"]), float(ends["last"]))


def _of_report(recording: Recording) -> Iterator[Entry]:
    """What the load generator summed up itself."""
    counts = {s: published(recording.aggregates, -1, "requests", s) for s in ("sent", "succeeded")}
    for quantity, count in ((SENT, counts["sent"]), (COMPLETED, counts["succeeded"])):
        if count is not None:
            yield _within(quantity, REPORT, count, LOST * count)
    mean = published(recording.aggregates, -1, "prompt_tokens", "mean")
    if mean is not None and (done := counts["succeeded"]):
        yield _within(PROMPT, REPORT, mean * done, _TOKENS * mean * done + _TOKENS_EACH * done)


_ENDS_EARLY = 0.9  # share of the last stage that its sends cover in a complete run


def ends_early(recording: Recording) -> tuple[Stage, float] | None:
    """The last load stage and the share of it that sends cover, if it was stopped, or its records are cut off."""
    sent = recorded_requests(recording).frame(["stage", "arrival_us"]).drop_nulls()
    if sent.height < FEW_LOST or not recording.stages:
        return None
    last = max(recording.stages, key=lambda stage: stage.stage)
    at_us = sent.filter(pl.col("stage") == last.stage)["arrival_us"].to_numpy()
    share = float(np.ptp(at_us)) / last.duration_us if len(at_us) else 1.0
    return (last, share) if share < _ENDS_EARLY else None


def _of_sends(recording: Recording) -> Iterator[Entry]:
    """What the client's own file says of how many it sent: announced stages, numbers in ids, a constant rate."""
    requests = recorded_requests(recording)
    sent = requests.frame(["stage", "arrival_us", "request_id"])
    begun = set(sent["stage"].drop_nulls())
    announced = sum(s.rate_per_s * s.duration_us / 1e6 for s in recording.stages if s.stage in begun)
    if (early := ends_early(recording)) is not None:
        announced -= (1 - early[1]) * early[0].rate_per_s * early[0].duration_us / 1e6
    if announced and requests.height >= FEW_LOST:
        tolerance = max(_POISSON * announced**0.5, lost(announced))
        yield replace(_within(SENT, STAGES, announced, tolerance, "rate times duration"), high=math.inf)
    if (numbers := _numbers(sent["request_id"])) is not None:
        count = int(numbers.max() - numbers.min()) + 1
        yield replace(_within(SENT, IDS, count, lost(count), f"{numbers.min()} to {numbers.max()}"), high=math.inf)
    if beats := _beats(by_arrival(sent.drop_nulls("arrival_us"))):
        yield replace(_within(SENT, BEAT, beats, lost(beats), "whole periods"), high=math.inf)


_NUMBER_AT_END = "[0-9]{1,9}$"
_MOST_NUMBERS_LEFT_OUT = 0.4  # share of the numbers in ids; with more gaps they do not count requests
_IN_ORDER = 0.95  # share of ids whose numbers rise with the sends


def _numbers(ids: pl.Series) -> Int64s | None:
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


# Sends at a constant rate:
_ONE_PERIOD = 0.6  # at least this share of the gaps is one period
_WHOLE_PERIODS = 0.95  # at least this share is a whole number of periods,
_JITTER = 0.05  # to this share of a period
_LONGEST_HOLE = 10  # periods; a longer gap is a pause


def _beats(sent: pl.DataFrame) -> int:
    """How many sends a constant rate makes, with those left out; 0 if the rate is not constant."""
    beats = 0
    for _, stage in sent.group_by("stage", maintain_order=True):
        gaps_us = stage["arrival_us"].diff().drop_nulls().to_numpy().astype(np.float64)
        period_us = float(np.median(gaps_us)) if len(gaps_us) >= 20 else 0.0
        if period_us <= 0:
            return 0
        periods = gaps_us / period_us
        whole = (np.abs(periods - np.rint(periods)) <= _JITTER) & (np.rint(periods) >= 1)
        if whole.mean() < _WHOLE_PERIODS or (np.rint(periods) == 1).mean() < _ONE_PERIOD:
            return 0
        skipped = np.rint(periods[whole & (periods <= _LONGEST_HOLE)]) - 1
        beats += int(skipped.sum()) + len(stage)
    return beats


# -- The server -------------------------------------------------------------------------------------------------------


def _tokens(client: dict[str, Entry], quantity: str, others: float = 0.0) -> float:
    """By how many tokens a server may differ from its client; ``others``: requests that one side alone has."""
    if quantity not in client:
        return math.inf
    sent, tokens = client[SENT].value, client[quantity].value
    return _TOKENS * tokens + _TOKENS_EACH * sent + others * _LONG_WARM_UP * tokens / sent


def _of_journeys(recording: Recording, client: dict[str, Entry]) -> Iterator[Entry]:
    """Requests that the server traced, from the first send until a pause; lengths of those that are the client's."""
    if recording.lifecycles.is_empty() or SENT not in client:
        return
    journeys = recording.lifecycles.frame(["request_index", "arrived_us", "prompt_tokens", "output_tokens"])
    known = journeys["request_index"].drop_nulls().len()
    timed = journeys.drop_nulls("arrived_us").sort("arrived_us")
    last_us = int(recorded_requests(recording)["arrival_us"].max() or 0)  # type: ignore[arg-type]
    if known and client[SENT].value >= FEW_LOST:
        during = timed.filter(pl.col("arrived_us").is_between(0, last_us)).height
        own_later = timed.filter((pl.col("arrived_us") > last_us) & pl.col("request_index").is_not_null()).height
        count = during + own_later + _goes_on(timed, last_us, _PAUSES * last_us / client[SENT].value)
        entry = _within(SENT, JOURNEYS, count, lost(client[SENT].value), "first send to a pause")
        yield replace(entry, high=math.inf)  # others may not have been traced
    pairs = recording.requests.frame(["request_index", "prompt_tokens", "output_tokens", "output_tokens_source"]).join(
        journeys.drop_nulls("request_index"), on="request_index", suffix="_served"
    )
    for quantity, name in ((PROMPT, "prompt_tokens"), (DECODED, "output_tokens")):
        both = pairs.select(name, f"{name}_served").drop_nulls()
        if quantity in client and both.height and (sent := int(both[name].sum())):
            scaled = client[quantity].value * int(both[f"{name}_served"].sum()) / sent
            yield _within(quantity, JOURNEYS, scaled, _tokens(client, quantity), f"by {both.height:,} requests")
    if not journeys.is_empty() and (preempted := recording.lifecycles.aggregate(n="sum(preemptions)")["n"]) is not None:
        yield _within(PREEMPTIONS, JOURNEYS, int(preempted), math.inf)


def _goes_on(timed: pl.DataFrame, last_us: int, pause_us: float) -> int:
    """Journeys of no request of the client that follow each other, and its last send, without a pause."""
    after = timed.filter(pl.col("request_index").is_null() & (pl.col("arrived_us") > last_us))["arrived_us"]
    if after.is_empty():
        return 0
    gaps_us = after.diff().fill_null(int(after[0]) - last_us)
    return int((gaps_us <= pause_us).cum_min().sum())


def _of_metrics(recording: Recording, client: dict[str, Entry]) -> Iterator[Entry]:
    """Counters of the server: differences of two snapshots, or one that counts since the server's start."""
    counts = {
        name: published(recording.aggregates, -1, f"server_{name}", "succeeded" if name == "requests" else "sum")
        for name in ("requests", "prompt_tokens", "output_tokens", "prefix_hits", "preemptions")
    }
    done = counts["requests"]
    if done is None:
        return
    between = (published(recording.aggregates, -1, "server_snapshots", "count") or 0) > 1
    covers = "between snapshots" if between else "since its start"
    of = (
        client[COMPLETED].value if COMPLETED in client else published(recording.aggregates, -1, "requests", "succeeded")
    )
    others = 0.0 if of is None else abs(done - of)
    rounds = warm_ups(recording, done - (of or done))
    covers += f", {counted(rounds, 'warm-up')} per client" if rounds else ""
    output = counts["output_tokens"]
    stated = {
        COMPLETED: (done, max(OTHERS * (of or done), FEW_OTHERS, others if rounds else 0.0)),
        PROMPT: (counts["prompt_tokens"], _tokens(client, PROMPT, others)),
        DECODED: (None if output is None else output - done, _tokens(client, DECODED, others)),
        HITS: (counts["prefix_hits"], _tokens(client, PROMPT, others)),
        PREEMPTIONS: (counts["preemptions"], math.inf),
    }
    for quantity, (value, tolerance) in stated.items():
        if value is not None:
            entry = _within(quantity, METRICS, value, tolerance, covers)
            with_preempted = quantity == HITS and counts["preemptions"]  # hits of those that came back count as well
            yield entry if between and not with_preempted else replace(entry, low=0.0)


def warm_ups(recording: Recording, beyond: float) -> int:
    """How often each client of a closed loop sent a request to warm up, if that explains the ``beyond`` of a server."""
    clients = published(recording.aggregates, -1, "concurrency", "asked") or 0.0
    rounds = beyond / clients if clients >= _FEWEST_CLIENTS else 0.0
    return int(rounds) if rounds in range(1, _MOST_WARM_UPS + 1) else 0


def preemptions(recording: Recording) -> int | None:
    """How many the server counted itself or its steps show; None where nothing counts them."""
    counted = published(recording.aggregates, -1, "server_preemptions", "sum")
    if counted is None and not recording.steps.is_empty():
        counted = recording.steps.aggregate(n="sum(preempted_requests)")["n"]
    return None if counted is None else int(counted)


def _of_log(recording: Recording, client: dict[str, Entry]) -> Iterator[Entry]:
    """Iteration lines; a log longer than the client's run may contain lines of other runs."""
    rows = recording.iterations.where("NOT dummy")
    if rows.is_empty():
        return
    sums = rows.aggregate(
        steps="count(*)",
        prefill="sum(prefill_tokens)",
        decode="sum(decode_tokens)",
        logged_us="max(logged_us) - min(logged_us)",
        kv_usage="max(kv_usage)",
    )
    yield Entry(STEPS, LOG, sums["steps"], 0, math.inf, "iteration lines")
    if SPAN not in client:
        return
    run_us = client[SPAN].high - client[SPAN].low
    # Includes tokens recomputed after a preemption and rejected drafts: more than the client's.
    preempted = preemptions(recording)
    if preempted is None and (sums["kv_usage"] or 1.0) < _SHORT_OF_BLOCKS:
        preempted = 0
    exact = preempted == 0 and "speculative_config" not in recording.engine
    of_run = exact and sums["logged_us"] is not None and sums["logged_us"] <= run_us + _DISTINCT_US
    covers = "iteration lines" if of_run else "whole log"
    rate = recording.prefix_hit_rate
    if not recording.argument("enable_prefix_caching", True):
        rate = 0.0
    for quantity, value in ((DECODED, sums["decode"]), (PROMPT, sums["prefill"])):
        if quantity == PROMPT and (rate is None or rate >= 1):
            continue
        whole = int(value) / (1 - (rate or 0.0)) if quantity == PROMPT else int(value)
        entry = _within(quantity, LOG, whole, _tokens(client, quantity), covers)
        yield entry if of_run else replace(entry, low=0.0)


def _of_throughput(recording: Recording, client: dict[str, Entry]) -> Iterator[Entry]:
    """Output tokens by the log's throughput lines in the run, which are those of all clients."""
    least = published(recording.aggregates, -1, "server_log_output_tokens", "least")
    if least is None or DECODED not in client:
        return
    most = published(recording.aggregates, -1, "server_log_output_tokens", "most")
    least, most = (math.inf if tokens is None else tokens - client[COMPLETED].value for tokens in (least, most))
    tolerance = _tokens(client, DECODED)
    low, high = max(least - tolerance, 0.0), most + tolerance
    yield Entry(DECODED, LOG, low, low, high, "throughput lines", in_bounds=True)


@dataclass(frozen=True)
class StepTotals:
    """Sums over the step records: a share ``rate`` of all steps from the first to the last.

    ``prefill_error``: standard error of ``prefill_tokens / rate``, where each step was drawn with the same chance.
    """

    steps: int
    rate: float
    prefill_tokens: int
    prefill_error: float


def step_totals(recording: Recording) -> StepTotals | None:
    """None without step records that count prefill tokens."""
    of = steps_by_id(recording.steps, "prefill_tokens").aggregate(
        steps="count(*)",
        range="max(step_id) - min(step_id) + 1",
        tokens="sum(prefill_tokens)",
        squares="sum(prefill_tokens * prefill_tokens)",
    )
    if not of["steps"]:
        return None
    rate = of["steps"] / of["range"]
    error = math.sqrt((1 - rate) * int(of["squares"])) / rate
    return StepTotals(of["steps"], rate, int(of["tokens"]), error)


def holds_the_run(recording: Recording) -> bool:
    """Whether the step records are those of the whole run: a log that breaks off has half of the decoded tokens."""
    decoded = {entry.source: entry for entry in entries(recording) if entry.quantity == DECODED}
    if CLIENT not in decoded or STEP_RECORDS not in decoded:
        return True
    return decoded[STEP_RECORDS].value >= _HELD * decoded[CLIENT].value


def _of_steps(recording: Recording, client: dict[str, Entry]) -> Iterator[Entry]:
    """Step records: sums of every step of the run; of a sample only what is beyond its noise."""
    totals = step_totals(recording)
    if totals is None:
        return
    every = totals.rate == 1
    if (counted := _step_log(recording).get("counted_steps")) is not None:
        yield _within(STEPS, COUNTERS, int(counted), OTHERS * int(counted), "the step log")
    records, sampled = recording.steps.height, not every and not _step_log(recording)
    yield Entry(STEPS, STEP_RECORDS, records, records, math.inf if sampled else records)
    clock = recording.clock("step")
    placed = clock is not None and clock.placed not in ("", NOT_KNOWN)
    ends = recording.steps.aggregate(first="min(start_us)", last="max(start_us)")
    if SPAN in client and placed and ends["first"] is not None:
        yield Entry(SPAN, STEP_RECORDS, 0, ends["first"] - _DISTINCT_US, ends["last"] + _DISTINCT_US, "±1 s")
    if SENT not in client:
        return
    alone = recording.argument("data_parallel_size", 1) == 1
    again = bool(preemptions(recording))  # tokens of preempted requests are computed again
    scaled = totals.prefill_tokens / totals.rate
    tolerance = _tokens(client, PROMPT) + _NOISE * totals.prefill_error
    prefill = _within(PROMPT, STEP_RECORDS, scaled, tolerance, "tokens computed" if every else "a sample of steps")
    if not again:
        yield replace(prefill, high=math.inf)
    if not every or not alone or DECODED not in client:
        return
    of_run = recording.steps.where("decode_tokens IS NOT NULL")
    if placed:
        of_run = of_run.between("start_us", int(client[SPAN].low), int(client[SPAN].high))
    decoded = int(of_run.aggregate(n="coalesce(sum(decode_tokens), 0)")["n"])
    entry = _within(DECODED, STEP_RECORDS, decoded, _tokens(client, DECODED), "steps of the run")
    yield replace(entry, low=0.0) if again or "speculative_config" in recording.engine else entry
    if PROMPT in client and not again and decoded >= _HELD * client[DECODED].value:
        hits = max(client[PROMPT].value - totals.prefill_tokens, 0)
        yield _within(HITS, STEP_RECORDS, hits, _tokens(client, PROMPT), "sent, not computed")


def _of_depth(recording: Recording) -> Iterator[Entry]:
    """Requests in the engine when the recorded steps began, by their depths and by sends and ends at the client.

    Of several load stages that in which the two are furthest apart.  Records of several engines have the depth of one.
    """
    pairs = [pair for window in stage_windows(recording) if (pair := _in_flight(recording, window)) is not None]
    if not pairs:
        return
    furthest = max(pairs, key=lambda pair: abs(math.log(max(pair[1].value, _NO_DEPTH) / pair[0].value)))
    if not (furthest[1].contradicts(furthest[0]) and step_anchors(recording).mixed):
        yield from furthest


def _in_flight(recording: Recording, window: Window) -> tuple[Entry, Entry] | None:
    """Those of the client and of the step records in a window; None of few.

    Where journeys say how many of the client's were in the engine, those are the fewest that the steps can have.
    """
    depths = steps_in(recording, window, "running_depth", "waiting_depth")
    steps = depths.frame(["start_us", "running_depth", "waiting_depth"]).drop_nulls("running_depth")
    requests = recorded_requests(recording).select("request_index", "arrival_us", "e2e_us").drop_nulls()
    if min(requests.height, steps.height) < _FEWEST_IN_FLIGHT:
        return None
    sent_us, end_us = requests["arrival_us"], requests["arrival_us"] + requests["e2e_us"]
    at_us, covers = steps["start_us"].to_numpy(), f"{named(window)}, at {steps.height:,} steps"
    in_flight = least = max(_mean_open(sent_us, end_us, at_us), _NO_DEPTH)
    journeys = recording.lifecycles.frame(["request_index", "queued_us", "finished_us"]).drop_nulls()
    both = requests.join(journeys.unique("request_index", keep="none"), on="request_index")
    # A stamp that is not between a request's send and its end is of another clock, or of another request.
    ended = pl.col("finished_us") <= pl.col("arrival_us") + pl.col("e2e_us")
    within = both.filter(pl.col("queued_us") >= pl.col("arrival_us"), ended)
    if within.height >= _NEARLY_ALL * requests.height:
        least = min(_mean_open(within["queued_us"], within["finished_us"], at_us), in_flight)
    depth = float((steps["running_depth"] + steps["waiting_depth"].fill_null(0)).mean() or 0)  # type: ignore[arg-type]
    most = depth / _LESS_IN_ENGINE + _ON_THE_WAY
    of_steps = Entry(IN_FLIGHT, STEP_RECORDS, depth, depth / _MORE_IN_ENGINE, most, covers)
    return Entry(IN_FLIGHT, CLIENT, in_flight, least, in_flight, covers), of_steps


def _mean_open(begin_us: pl.Series, end_us: pl.Series, at_us: Int64s) -> float:
    """How many spans are open, on average over these times."""
    begun, ended = (np.searchsorted(np.sort(us.to_numpy()), at_us, side="right") for us in (begin_us, end_us))
    return float((begun - ended).mean())


def _step_log(recording: Recording) -> Measured:
    """What a step log says of itself; stored with the finding of its check."""
    stored = next((f.measured for f in recording.findings if f.check == "recorder"), None)
    return recording.recorder or stored or {}


def _breaks_off(recording: Recording) -> bool:
    """Whether a step log ends before the run by its own account: no counters at its end, or requests without an end."""
    log = _step_log(recording)
    return bool(log) and (not log["counted_to_the_end"] or int(log["arrivals"] or 0) > int(log["finished"] or 0))
