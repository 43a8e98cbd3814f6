"""What the server says of itself: its metrics, its arguments, its log's steps and its recorder."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.checks.evidence import Context, InstrumentCheck, Measured, mean, not_checked
from blis_replay.ingest.errors import counted
from blis_replay.ingest.recording import ENGINE_CHECK, Finding, Recording, Severity
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.served import completed_requests, published, recorded_requests
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.ingest.tables import Table, columns_named

METRICS_CHECK = "server_metrics"
METRICS_MEASURES = "what the server counted and timed itself between two snapshots of /metrics, against the client"
METRICS_RULE = (
    "counts of requests and tokens must be equal, but for requests of others (warm-up); where two snapshots have 5 % "
    "and 10 requests more than the client, nothing is judged; a mean latency of the client "
    "is that of the server and the way between them: 2 % or 20 ms more at most for TTFT and E2E, 2 % either way for ITL"
)
_SHARE = 0.02
_WAY_US = 20_000.0
_FEW = 0.05  # share of requests of other clients; with more the means of both sides are not comparable
_WARM_UP = 10  # requests that may warm the server up beside them


@dataclass(frozen=True)
class _Latency:
    """A mean latency of both sides, us."""

    metric: str
    client_us: float
    server_us: float

    def agrees(self, tolerance: float) -> bool:
        """Whether the way between the two explains the difference; ``tolerance``: share that other requests explain."""
        share = (_SHARE + tolerance) * self.server_us
        more = share if self.metric == "itl" else max(share, _WAY_US)
        return -share <= self.client_us - self.server_us <= more

    def said(self) -> str:
        """In words, with ms."""
        return f"{self.metric.upper()} {self.client_us / 1e3:,.2f} against {self.server_us / 1e3:,.2f} ms"


def check_metrics(recording: Recording, context: Context) -> list[Finding]:
    """Whether counts agree, whether latencies do, and what the server says of its memory; none without snapshots."""
    if published(recording.aggregates, -1, "server_requests", "succeeded") is None:
        return []
    if recorded_requests(recording).is_empty():
        return [not_checked(METRICS_CHECK, "", "no recorded requests to compare with"), *_memory(recording)]
    return [_counts(recording), *_latencies(recording), *_memory(recording)]


def metrics_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """All numbers of both sides."""
    client, server = _client(recording), _server(recording)
    rows = tuple((name, client.get(name), server.get(name)) for name in dict.fromkeys((*client, *server)))
    return (Table("client and server", columns_named("quantity", "client", "server"), rows if server else ()),)


def _client(recording: Recording) -> dict[str, float | None]:
    requests = completed_requests(recording, "prompt_tokens", "output_tokens", "ttft_us", "e2e_us")
    sums = requests.select(pl.col("prompt_tokens", "output_tokens").sum())
    timed = requests.filter((pl.col("output_tokens") > 1) & pl.col("ttft_us").is_not_null())
    decoding = timed.select((pl.col("e2e_us") - pl.col("ttft_us")).sum() / (pl.col("output_tokens") - 1).sum()).item()
    return {
        "requests": float(requests.height),
        "prompt_tokens": float(sums["prompt_tokens"][0]),
        "output_tokens": float(sums["output_tokens"][0]),
        "ttft_us": mean(requests, "ttft_us"),
        "itl_us": decoding if timed.height else None,
        "e2e_us": mean(requests, "e2e_us"),
    }


def _server(recording: Recording) -> dict[str, float | None]:
    sources = {
        "requests": ("server_requests", "succeeded"),
        "failed": ("server_requests", "failed"),
        **{name: (f"server_{name}", "sum") for name in ("prompt_tokens", "output_tokens", "preemptions")},
        **{name: (f"server_{name}", "sum") for name in ("prefix_queries", "prefix_hits")},
        **{f"{name}_us": (f"server_{name}", "mean") for name in ("ttft", "itl", "e2e", "queue", "prefill", "decode")},
    }
    numbers = {name: published(recording.aggregates, -1, *source) for name, source in sources.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _counts(recording: Recording) -> Finding:
    client, server = _client(recording), _server(recording)
    requests, others = int(client["requests"] or 0), int((server["requests"] or 0) - (client["requests"] or 0))
    differences = {
        name: int((server.get(name) or 0) - (client[name] or 0))
        for name in ("prompt_tokens", "output_tokens")
        if name in server
    }
    measured: Measured = {"client_requests": requests, "server_requests": int(server["requests"] or 0)}
    measured |= dict(differences.items())
    listed = " and ".join(f"{difference:,} {name.replace('_', ' ')}" for name, difference in differences.items())
    severity: Severity = "note"
    if others > 0:
        message = (
            f"the server completed {others} more requests than the {requests} of the client, with {listed} more: "
            "warm-up requests, or other clients"
        )
        # A single snapshot counts what came before the run, too.
        between = published(recording.aggregates, -1, "server_snapshots", "count") or 0
        if between > 1 and others > max(_FEW * requests, _WARM_UP):
            severity = "unusable"
            message += (
                ", or records that are lost; what can be replayed is not the load that was served: take the snapshots "
                "right before and after the run, or leave them out"
            )
    elif others < 0:
        message = (
            f"the server completed {-others} fewer requests than the {requests} of the client: the snapshots do not "
            "cover the whole run, or they are of another server"
        )
    elif not any(differences.values()):
        message = f"server and client count the same: {requests} requests, and their prompt and output tokens"
    else:
        each = ", ".join(
            f"{difference / requests:+.2f} {name.replace('_', ' ')}"
            for name, difference in differences.items()
            if difference and requests
        )
        message = f"server and client count the same {requests} requests, but per request the server counts {each}"
    return Finding(METRICS_CHECK, severity, "", message, measured, METRICS_RULE)


def _latencies(recording: Recording) -> list[Finding]:
    client, server = _client(recording), _server(recording)
    tolerance = abs((server["requests"] or 0) / (client["requests"] or 1) - 1)
    if not client["requests"] or tolerance > _FEW:
        return [
            not_checked(
                METRICS_CHECK, "e2e", f"{100 * tolerance:.0f} % of the requests are not on both sides, so means differ"
            )
        ]
    pairs = [
        _Latency(name, float(mine), float(theirs))
        for name in ("ttft", "itl", "e2e")
        if (mine := client[f"{name}_us"]) is not None and (theirs := server.get(f"{name}_us")) is not None
    ]
    findings = []
    for agrees, words in ((True, "agree"), (False, "disagree")):
        # An outlier among the others weighs more than their share.
        of = [pair for pair in pairs if pair.agrees(2 * tolerance) is agrees]
        if of:
            said = ", ".join(pair.said() for pair in of)
            more = (
                "" if agrees else "; the way between them does not explain it, so one of them measures something else"
            )
            measured: Measured = {}
            for pair in of:
                measured |= {f"client_{pair.metric}_us": pair.client_us, f"server_{pair.metric}_us": pair.server_us}
            message = f"mean latencies of client and server {words}: {said}{more}"
            findings.append(
                Finding(METRICS_CHECK, "note", "" if agrees else of[0].metric, message, measured, METRICS_RULE)
            )
    return findings


def _memory(recording: Recording) -> list[Finding]:
    server = _server(recording)
    queries, hits, preemptions = (server.get(name) for name in ("prefix_queries", "prefix_hits", "preemptions"))
    said = [] if preemptions is None else [f"{int(preemptions)} preemptions"]
    if queries:
        said.append(f"{100 * (hits or 0) / queries:.1f} % of {int(queries):,} prompt tokens in the prefix cache")
    measured: Measured = {"preemptions": preemptions, "prefix_queries": queries, "prefix_hits": hits}
    return [Finding(METRICS_CHECK, "note", "", f"the server counted {' and '.join(said)}", measured)] if said else []


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
        amiss.append("it breaks off behind its last counters, up to half a second is lost")
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


def recorder_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """None: the numbers are those of the finding."""
    return ()


ITERATIONS_CHECK = "iterations"
ITERATIONS_MEASURES = "steps in the server's log: when they began, and their elapsed time against the step cycle"
ITERATIONS_RULE = (
    "elapsed time is what the engine waited for the model. It leaves out schedule(), the processing of outputs and, "
    "with asynchronous scheduling, what ran before the wait. So it is a lower bound of the cycle and no step time. "
    "The log stamps whole seconds: starts are worked out from arrivals, times of tokens and the server's own "
    "durations, and lie at most the stated uncertainty from the true ones"
)
_CYCLES = """
SELECT * FROM (
    SELECT *, lead(start_us) OVER by_index - start_us AS cycle_us, lead(decode_requests) OVER by_index > 0 AS goes_on
    FROM steps WHERE NOT dummy WINDOW by_index AS (ORDER BY engine, iteration)
)
WHERE cycle_us > 0 AND goes_on AND decode_requests > 0
"""


def check_iterations(recording: Recording, context: Context) -> list[Finding]:
    """One finding where the log has iterations: how many, how many of them placed, elapsed time and cycle."""
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
    cycles = _cycles(rows).aggregate(cycle_us="avg(cycle_us)", elapsed_of_cycle="sum(elapsed_us) / sum(cycle_us)")
    measured |= cycles | {"asynchronous": int(is_asynchronous(recording))}
    return [Finding(ITERATIONS_CHECK, "note", "step_time", _sentence(measured), measured, ITERATIONS_RULE)]


def iterations_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Elapsed time and cycle by decoding requests, over steps that decode and are followed by one that does."""
    binned = (
        "SELECT decode_requests // 4 * 4 AS depth, count(*) AS steps, avg(cycle_us) AS cycle_us, "
        "avg(elapsed_us) AS elapsed_us FROM steps GROUP BY depth ORDER BY depth"
    )
    schema = {"depth": pl.Int64, "steps": pl.Int64, "cycle_us": pl.Float64, "elapsed_us": pl.Float64}
    rows = query(binned, schema, steps=_cycles(recording.iterations)).frame().rows()
    return (
        Table(
            "elapsed time and step cycle by decoding requests",
            columns_named("decoding", "steps", "cycle ms", "elapsed ms"),
            tuple(
                (f"{depth} to {depth + 3}", steps, round(cycle / 1e3, 3), round(elapsed / 1e3, 3))
                for depth, steps, cycle, elapsed in rows
            ),
            bars="cycle ms",
        ),
    )


def _cycles(rows: Rows) -> Rows:
    schema = {**rows.schema, "cycle_us": pl.Int64, "goes_on": pl.Boolean}
    return query(_CYCLES, schema, steps=rows)


def _sentence(measured: Measured) -> str:
    several = f" of {measured['engines']} engines" if int(measured["engines"] or 0) > 1 else ""
    dummies = f", {measured['dummies']:,} of them without requests" if measured["dummies"] else ""
    message = f"{measured['iterations']:,} iterations{several}{dummies}; "
    if not measured["placed"]:
        message += "when they began is not known"
    else:
        uncertainty_ms = float(measured["uncertainty_us"] or 0) / 1e3
        message += f"{measured['placed']:,} are placed, the median to within {uncertainty_ms:.1f} ms"
    if (share := measured["elapsed_of_cycle"]) is not None:
        cycle_ms = float(measured["cycle_us"] or 0) / 1e3
        message += f"; their elapsed time is {100 * float(share):.0f} % of the cycle of {cycle_ms:.2f} ms"
    if measured["asynchronous"]:
        message += ", and with asynchronous scheduling it is not the step either"
    return message


METRICS = InstrumentCheck(METRICS_CHECK, METRICS_MEASURES, METRICS_RULE, check_metrics, metrics_tables)
ARGUMENTS = InstrumentCheck(ARGUMENTS_CHECK, ARGUMENTS_MEASURES, ARGUMENTS_RULE, check_arguments, arguments_tables)
RECORDER = InstrumentCheck(RECORDER_CHECK, RECORDER_MEASURES, RECORDER_RULE, check_recorder, recorder_tables)
ITERATIONS = InstrumentCheck(
    ITERATIONS_CHECK, ITERATIONS_MEASURES, ITERATIONS_RULE, check_iterations, iterations_tables
)
