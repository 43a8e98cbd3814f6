"""What the server says of itself: its metrics, its arguments, its log's steps and its recorder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import polars as pl

from blis_replay.base.errors import counted
from blis_replay.ingest.checks.evidence import Context, InstrumentCheck, Measured, mean
from blis_replay.ingest.recording import ENGINE_CHECK, FIRST_TOKEN, STAMPS, WAY, Finding, Recording, Severity
from blis_replay.ingest.served import completed_requests, published
from blis_replay.ingest.tables import Table, columns_named

METRICS_CHECK = "server_metrics"
METRICS_MEASURES = "mean latencies that the server timed itself between two snapshots of /metrics, against the client"
METRICS_RULE = (
    "a mean latency of the client is that of the server and the way between them: 2 % or 20 ms more at most for TTFT "
    "and E2E, 2 % for ITL, and never less.  Requests of others raise the server's mean by what they took.  A way of "
    "more than 10 % of the client's latency is not a property of the server: what it is part of is unusable"
)
_SHARE = 0.02
_WAY_US = 20_000.0
_PARTS = ("queue", "prefill", "decode")
_MOST_WAY = 0.10  # share of the client's mean latency, the limit of E2E
# A proxy delays every request.  Where the fastest ones (this quantile) wait for less than half of the mean, waits have
# a tail: a client without a core to run on had a median of 8 ms, a mean of 32 and a longest one of 275 ms.
_FASTEST = 0.1
_FEWEST_WAYS = 20


@dataclass(frozen=True)
class _Latency:
    """A mean latency of both sides, us; ``most_us``: of the server, if the requests of others took no time."""

    metric: str
    client_us: float
    server_us: float
    most_us: float

    @property
    def way_us(self) -> float:
        """How much longer the client's is than the server and a usual way allow; below 0: shorter. 0: they agree."""
        usual_us = _SHARE * self.most_us
        usual_us = usual_us if self.metric == "itl" else max(usual_us, _WAY_US)
        if self.client_us > self.most_us + usual_us:
            return self.client_us - self.most_us
        least_us = (1 - _SHARE) * self.server_us if self.most_us <= self.server_us else 0.0
        return min(self.client_us - least_us, 0.0)

    def said(self) -> str:
        """In words, with ms."""
        return f"{self.metric.upper()} {self.client_us / 1e3:,.2f} against {self.server_us / 1e3:,.2f} ms"


def check_metrics(recording: Recording, context: Context) -> list[Finding]:
    """Whether mean latencies agree; what lies between client and server where not; none without snapshots."""
    pairs = _latencies(recording)
    apart = {pair.metric: pair for pair in pairs if pair.way_us}
    agree = [pair for pair in pairs if not pair.way_us]
    findings = []
    if agree:
        others = any(replace(pair, most_us=pair.server_us).way_us for pair in agree)
        how = "do not contradict each other, as the server's are of other clients' requests too" if others else "agree"
        said = ", ".join(pair.said() for pair in agree)
        message = f"mean latencies of client and server {how}: {said}{_parts(recording)}"
        findings.append(Finding(METRICS_CHECK, "note", "", message, _measured(agree), METRICS_RULE))
    if apart:
        metric, why, of_way = _what_lies_between(pairs, recording)
        of_way_only = ("itl",) if metric == WAY else ()  # gaps are shorter where the first token alone is late
        early = any(pair.way_us < 0 for name, pair in apart.items() if name not in of_way_only)
        struck = early or any(pair.way_us > _MOST_WAY * pair.client_us for pair in apart.values())
        said = ", ".join(pair.said() for pair in apart.values())
        message = f"mean latencies of client and server differ: {said}: {why}"
        severity: Severity = "unusable" if struck else "note"
        measured = _measured(apart.values()) | of_way
        findings.append(Finding(METRICS_CHECK, severity, metric, message, measured, METRICS_RULE))
    return findings


def _parts(recording: Recording) -> str:
    """What the server's mean E2E is made of, by its own counters; nothing if it does not say."""
    parts = [(name, published(recording.aggregates, -1, f"server_{name}", "mean")) for name in _PARTS]
    said = [f"{name} {us / 1e3:,.1f} ms" for name, us in parts if us is not None]
    count = published(recording.aggregates, -1, "server_e2e", "count") or 0
    return f"; of the server's {count:,.0f} requests: {', '.join(said)}" if said else ""


def _what_lies_between(pairs: Sequence[_Latency], recording: Recording) -> tuple[str, str, Measured]:
    """What these latencies strike, why they differ while others agree, and what a way adds to each request."""
    ways_us = {pair.metric: pair.way_us for pair in pairs}
    ttft_us, e2e_us = (ways_us.get(name, 0.0) for name in ("ttft", "e2e"))
    if min(ttft_us, e2e_us) < 0:
        early = "no request is faster for its client, so sends are stamped late, or the snapshots are of other requests"
        return WAY, early, {}
    if not ttft_us and not e2e_us:
        return "itl", "the two count tokens differently, or tokens come together", {}
    # Where requests of others hide how far E2E is off, gaps tell: they are shorter after a first event that is late.
    gaps = [p.way_us == 0 and p.client_us >= (1 - _SHARE) * p.server_us for p in pairs if p.metric == "itl"]
    equal_gaps = gaps[0] if gaps else abs(ttft_us - e2e_us) <= max(_WAY_US, _SHARE * e2e_us)
    # A client that reads slowly, or is throttled, has longer gaps.
    no_longer = any(p.way_us <= 0 for p in pairs if p.metric == "itl") and abs(ttft_us - e2e_us) <= _WAY_US
    if ttft_us and (equal_gaps or no_longer):
        return WAY, *_way(max(ttft_us, e2e_us), recording)
    if ttft_us > e2e_us + _WAY_US:
        return FIRST_TOKEN, "a proxy holds tokens back, or the first event of the client is not the first token", {}
    slow = "the client reads its streams slowly, or a proxy throttles them"
    return STAMPS if ttft_us else "e2e", slow, {}


def _way(mean_us: float, recording: Recording) -> tuple[str, Measured]:
    """What delays requests, by ``mean_us`` in the mean, and what the fastest of them wait, us, as far as that is known.

    That is the client's TTFT less the engine's, each on a clock of its own.
    """
    sent = completed_requests(recording, "request_index", "ttft_us").drop_nulls()
    stamps = recording.lifecycles.frame(["request_index", "arrived_us", "first_token_us"]).drop_nulls()
    way = pl.col("ttft_us") - (pl.col("first_token_us") - pl.col("arrived_us"))
    ways_us = sent.join(stamps, on="request_index").select(way=way)["way"]
    added = f"{mean_us / 1e3:.0f} ms"
    if len(ways_us) < _FEWEST_WAYS:
        return f"gaps are no longer, and a proxy, the network or a busy client adds {added} to a request", {}
    each_us = max(float(ways_us.quantile(_FASTEST) or 0), 0.0)
    measured: Measured = {"mean_way_us": mean_us, "each_request_us": each_us}
    if each_us >= mean_us / 2:
        return f"gaps are no longer, and a proxy or the network adds {added} to each request", measured
    waits = f"{added} in the mean, but one in ten of them at most {each_us / 1e3:.0f} ms"
    why = "no proxy delays only some: the client had no core to run on, or connections were held up"
    return f"gaps are no longer, and requests wait {waits}; {why}; give the load generator a core of its own", measured


def _measured(pairs: Iterable[_Latency]) -> Measured:
    measured: Measured = {}
    for pair in pairs:
        measured |= {f"client_{pair.metric}_us": pair.client_us, f"server_{pair.metric}_us": pair.server_us}
    return measured


def _latencies(recording: Recording) -> list[_Latency]:
    """The means that both sides have, where the server counted every request of the client.

    Where the client has aggregates only, TTFT and E2E are its stated means; its ITL may count tokens otherwise.
    """
    requests = completed_requests(recording, "output_tokens", "ttft_us", "e2e_us")
    served = published(recording.aggregates, -1, "server_requests", "succeeded")
    stated = {name: published(recording.aggregates, -1, name, "mean") for name in ("ttft", "e2e")}
    of_client = requests.height or int(published(recording.aggregates, -1, "requests", "succeeded") or 0)
    if served is None or not of_client or served < of_client:
        return []
    timed = requests.filter((pl.col("output_tokens") > 1) & pl.col("ttft_us").is_not_null())
    gaps = int((timed["output_tokens"] - 1).sum())
    decoded_us = float((timed["e2e_us"] - timed["ttft_us"]).sum())
    client = {
        "ttft": (mean(requests, "ttft_us") or stated["ttft"], of_client),
        "itl": (decoded_us / gaps if gaps else None, gaps),
        "e2e": (mean(requests, "e2e_us") or stated["e2e"], of_client),
    }
    pairs = []
    for metric, (client_us, count) in client.items():
        server_us, of = (published(recording.aggregates, -1, f"server_{metric}", name) for name in ("mean", "count"))
        if client_us is not None and server_us is not None and of:
            others = of / count if served > of_client else 1.0
            pairs.append(_Latency(metric, client_us, server_us, max(others, 1.0) * server_us))
    # Before a server that gets KV blocks another one prefills, which the client's TTFT and E2E include.
    apart = "kv_transfer_config" in recording.engine
    return [pair for pair in pairs if pair.metric == "itl" or not apart]


ARGUMENTS_CHECK = ENGINE_CHECK
ARGUMENTS_MEASURES = "whether the sources of the engine arguments agree"
ARGUMENTS_RULE = (
    "a file given at ingest goes before what the server says of itself, that before what was written down, and that "
    "before what is derived"
)


def check_arguments(recording: Recording, context: Context) -> list[Finding]:
    """What the readers of log, configuration and arguments found."""
    return [finding for finding in recording.findings if finding.check == ARGUMENTS_CHECK]


def arguments_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Every engine argument with its source."""
    rows = [(name, str(s.value), s.source, s.detail) for name, s in sorted(recording.engine.items())]
    return (Table("engine arguments", columns_named("argument", "value", "source", "", kind="text"), rows, cut=True),)


RECORDER_CHECK = "recorder"
RECORDER_MEASURES = "whether the step log of the recorder is whole, and what recording cost the engine"
RECORDER_RULE = (
    "steps, arrivals, ends and scheduled tokens as many as its own counters say, no step number left out, nothing "
    "dropped. Step records as many as its steps, and an end for every request. Each request that ended in good "
    "order: tokens found in the prefix cache plus tokens scheduled since its"
    " last admission are prompt and output less one (one more where a second batch was in flight). The cost is the "
    "time in the wrappers around the scheduler, which the engine waits for, and that of the thread that writes"
)
_COUNTS = ("steps", "arrivals", "finished", "scheduled_tokens")


def check_recorder(recording: Recording, context: Context) -> list[Finding]:
    """One finding where there is a step log, none where there is not."""
    log = recording.recorder
    if log is None:
        return []
    amiss = []
    if not log["counted_to_the_end"]:
        amiss.append("it breaks off behind its last counters")
    else:
        counts = ((name, log[name], log[f"counted_{name}"]) for name in _COUNTS)
        amiss += [f"{count:,} {name} of {said:,}" for name, count, said in counts if count != said]
    if recording.steps.height != log["steps"]:
        amiss.append(f"{recording.steps.height:,} step records of {log['steps']:,} steps in it")
    # Counters stand all along the file: cut behind some of them, it agrees with itself.
    if isinstance(begun := log["arrivals"], int) and isinstance(ended := log["finished"], int) and begun > ended:
        amiss.append(f"{begun - ended:,} requests have no end in it")
    for name, what in (("dropped", "records dropped by the recorder"), ("steps_missing", "steps left out")):
        if log[name]:
            amiss.append(f"{log[name]:,} {what}")
    if log["requests_not_conserved"]:
        torn = int(log["requests_not_conserved"])
        amiss.append(f"the tokens of {counted(torn, 'request')} do not add up")
    whole = f"{log['steps']:,} steps and the tokens of {log['requests_conserved']:,} requests add up"
    message = f"the step log is not whole: {'; '.join(amiss)}" if amiss else f"the step log is whole: {whole}"
    if log["wrapper_us_per_step"]:
        message += f"; it cost the engine {log['wrapper_us_per_step']:.1f} us per step"
    return [Finding(RECORDER_CHECK, "note", "", message, dict(log), RECORDER_RULE)]


ITERATIONS_CHECK = "iterations"
ITERATIONS_MEASURES = "steps in the server's log, and when they began"
ITERATIONS_RULE = (
    "the log stamps whole seconds: starts are worked out from arrivals, times of tokens and the server's own "
    "durations, and lie at most the stated uncertainty from the true ones.  The elapsed time in the log is what the "
    "engine waited for the model, so it is a lower bound of the cycle and no step time"
)


def check_iterations(recording: Recording, context: Context) -> list[Finding]:
    """One finding where the log has iterations: how many, and how many of them are placed."""
    rows = recording.iterations
    if rows.is_empty():
        return []
    measured: Measured = rows.aggregate(
        iterations="count(*)",
        engines="count(DISTINCT engine)",
        dummies="count(*) FILTER (dummy)",
        placed="count(start_us)",
        uncertainty_us="median(uncertainty_us)",
        elapsed_us="avg(elapsed_us)",
    )
    several = f" of {measured['engines']} engines" if int(measured["engines"] or 0) > 1 else ""
    dummies = f", {measured['dummies']:,} of them without requests" if measured["dummies"] else ""
    message = f"{measured['iterations']:,} iterations{several}{dummies}; "
    if measured["placed"]:
        uncertainty_ms = float(measured["uncertainty_us"] or 0) / 1e3
        message += f"{measured['placed']:,} are placed, the median to within {uncertainty_ms:.1f} ms"
    else:
        message += "when they began is not known"
    return [Finding(ITERATIONS_CHECK, "note", "step_time", message, measured, ITERATIONS_RULE)]


METRICS = InstrumentCheck(METRICS_CHECK, METRICS_MEASURES, METRICS_RULE, check_metrics)
ARGUMENTS = InstrumentCheck(ARGUMENTS_CHECK, ARGUMENTS_MEASURES, ARGUMENTS_RULE, check_arguments, arguments_tables)
RECORDER = InstrumentCheck(RECORDER_CHECK, RECORDER_MEASURES, RECORDER_RULE, check_recorder)
ITERATIONS = InstrumentCheck(ITERATIONS_CHECK, ITERATIONS_MEASURES, ITERATIONS_RULE, check_iterations)
