"""The server's own counters and sums (``/metrics`` before and after a run) as an independent check on the client."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured, completed_requests, not_checked, recorded_requests
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.stream.layout import published
from blis_replay.ingest.tables import Table, columns_named

CHECK = "server_metrics"
MEASURES = "what the server counted and timed itself between two snapshots of /metrics, against the client"
RULE = (
    "counts of requests and tokens must be equal, but for requests of others (warm-up); a mean latency of the client "
    "is that of the server and the way between them: 2 % or 20 ms more at most for TTFT and E2E, 2 % either way for ITL"
)
_SHARE = 0.02
_WAY_US = 20_000.0
# Requests of others beyond this share move a mean too far for a comparison.
_FEW = 0.05


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


def check(recording: Recording, context: Context) -> list[Finding]:
    """Whether counts agree, whether latencies do, and what the server says of its memory; none without snapshots."""
    if published(recording.aggregates, -1, "server_requests", "succeeded") is None:
        return []
    if recorded_requests(recording).is_empty():
        return [not_checked(CHECK, "", "no recorded requests to compare with"), *_memory(recording)]
    return [_counts(recording), *_latencies(recording), *_memory(recording)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
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
        "ttft_us": _mean(requests["ttft_us"]),
        "itl_us": decoding if timed.height else None,
        "e2e_us": _mean(requests["e2e_us"]),
    }


def _server(recording: Recording) -> dict[str, float | None]:
    sources = {
        "requests": ("server_requests", "succeeded"),
        "failed": ("server_requests", "failed"),
        **{name: (f"server_{name}", "sum") for name in ("prompt_tokens", "output_tokens", "preemptions")},
        **{name: (f"server_{name}", "sum") for name in ("prefix_queries", "prefix_hits")},
        **{f"{name}_us": (f"server_{name}", "mean") for name in ("ttft", "itl", "e2e", "queue", "prefill", "decode")},
    }
    found = {name: published(recording.aggregates, -1, *source) for name, source in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return float(mean) if isinstance(mean, int | float) else None


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
    if others > 0:
        message = (
            f"the server completed {others} more requests than the {requests} of the client, with {listed} more: "
            "warm-up requests, or other clients"
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
    return Finding(CHECK, "note", "", message, measured, RULE)


def _latencies(recording: Recording) -> list[Finding]:
    client, server = _client(recording), _server(recording)
    tolerance = abs((server["requests"] or 0) / (client["requests"] or 1) - 1)
    if not client["requests"] or tolerance > _FEW:
        return [
            not_checked(CHECK, "e2e", f"{100 * tolerance:.0f} % of the requests are not on both sides, so means differ")
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
            findings.append(Finding(CHECK, "note", "" if agrees else of[0].metric, message, measured, RULE))
    return findings


def _memory(recording: Recording) -> list[Finding]:
    server = _server(recording)
    queries, hits, preemptions = (server.get(name) for name in ("prefix_queries", "prefix_hits", "preemptions"))
    said = [] if preemptions is None else [f"{int(preemptions)} preemptions"]
    if queries:
        said.append(f"{100 * (hits or 0) / queries:.1f} % of {int(queries):,} prompt tokens in the prefix cache")
    measured: Measured = {"preemptions": preemptions, "prefix_queries": queries, "prefix_hits": hits}
    return [Finding(CHECK, "note", "", f"the server counted {' and '.join(said)}", measured)] if said else []
