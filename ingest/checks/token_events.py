"""Check 1: how many stream stamps the client took per output token (trace-formats, 4.4)."""

from __future__ import annotations

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    completed_requests,
    decode_gap_us,
    not_checked,
    published_decode_gap_us,
    true_output_tokens,
)
from blis_replay.ingest.checks.pictures import Cell, Table
from blis_replay.ingest.published_itl import PAIRED_QUANTILES, is_paired, published, published_itl
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.token_layout import NO_EVENTS, EventTotals, TokenLayout

CHECK = "token_events"
MEASURES = "stream stamps per output token, and the reported ITL against the true gap"
RULE = (
    "true gap / reported ITL above 1.5: one stamp per token gives 1.00, two give (2n+1)/(n-1), about 2.01 for n = 248"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Reported ITL against the true gap, from the stamps or, without them, from aggregates."""
    layout, totals = context.layout, context.events
    # Stamps of failed requests alone say less than aggregates over the others.
    if totals is not None and layout != NO_EVENTS and (totals.requests or not layout.identified):
        return [_from_events(recording, layout, totals)]
    return [_from_aggregates(recording)]


def pictures(recording: Recording, context: Context) -> tuple[Table, ...]:
    """The histogram of gaps between stamps with its modes; published quantiles where no stamp was kept."""
    if context.stamp_gaps is not None and not context.stamp_gaps.is_empty():
        bins = tuple((_gap(low_us), count) for low_us, count in context.stamp_gaps.iter_rows())
        note = "two stamps a token make two modes: some tens of us, and a step"
        return (Table("gaps between stream stamps", ("gap from", "gaps"), bins, bars="gaps", note=note),)
    reported = {
        name: published(recording.aggregates, -1, "itl_reported", name) for name in ("p50", *PAIRED_QUANTILES, "mean")
    }
    true = published_itl(recording.aggregates, -1, true_output_tokens(recording))
    paired = is_paired(recording.aggregates, -1, true_output_tokens(recording))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, value / 1e3, PAIRED_QUANTILES.get(name, "") if paired else name, _in_ms(true, name, paired))
        for name, value in reported.items()
        if value is not None and name != "max"  # one stall would dwarf all others
    )
    if not rows:
        return ()
    note = "a median far below p75 is the blank line after each token: half of the gaps are none"
    columns = ("reported", "ms", "stands for", "true ms")
    return (Table("published ITL", columns, rows, bars="ms", note=note if paired else ""),)


def _gap(low_us: float) -> str:
    return f"{low_us / 1e3:.3g} ms" if low_us >= 1000 else f"{low_us:.0f} us"


def _in_ms(true: dict[str, float], reported: str, paired: bool) -> float | None:
    value_us = true.get(PAIRED_QUANTILES.get(reported, "") if paired else reported)
    return None if value_us is None else value_us / 1e3


def _from_events(recording: Recording, layout: TokenLayout, totals: EventTotals) -> Finding:
    per_token = totals.stamps / totals.tokens if totals.tokens else None
    measured: Measured = {
        "layout": layout.name,
        "requests": totals.requests,
        "events_per_token": per_token,
        "reported_itl_us": published(recording.aggregates, -1, "itl_reported", "mean") or totals.stamped_gap_us,
        "true_gap_us": totals.token_gap_us,
    }
    if not layout.identified:
        measured["true_gap_us"] = decode_gap_us(completed_requests(recording))
        message = "some stream events carry several tokens: single gaps cannot be told from them, only the mean"
        rule = "the median request has an event for fewer than 98 % of its tokens"
        return Finding(CHECK, "unusable", "itl quantiles", message, measured, rule)
    if totals.token_gap_us is None or totals.stamped_gap_us is None:
        return not_checked(CHECK, "itl", "no completed request has two output tokens")
    if layout.stamps_per_token == 1 and layout.closing_events == 0:
        message = f"one stream event per token, mean gap {totals.token_gap_us / 1e3:.2f} ms"
        return Finding(CHECK, "note", "itl", message, measured, "the median request has one stamp per token")
    if layout.stamps_per_token == 1:
        message = f"one stream event per token and a closing one, which is left out: true gap {_ms(measured)}"
        return Finding(CHECK, "corrected", "itl", message, measured, "most requests end with an event that is no token")
    return _two_events(measured, "2n to 2n+3 stamps for n tokens, gaps alternating between under 0.2 ms and a step")


def _from_aggregates(recording: Recording) -> Finding:
    reported_us = published(recording.aggregates, -1, "itl_reported", "mean")
    if not reported_us:
        return not_checked(CHECK, "itl", "no stream events and no published ITL")
    true_us = published_decode_gap_us(recording, -1) or decode_gap_us(completed_requests(recording))
    tokens = true_output_tokens(recording)
    if true_us is None or tokens is None:
        if not is_paired(recording.aggregates):
            return not_checked(CHECK, "itl", "no true output length to compare the published ITL with")
        message = "the published ITL pools two stream events per token; its mean is about half the true gap"
        measured: Measured = {"reported_itl_us": reported_us, "true_gap_us": None, "events_per_token": None}
        return Finding(CHECK, "unusable", "itl", message, measured, "published ITL: median below 5 % of p75")
    return _compare(reported_us, true_us, tokens)


def _compare(reported_us: float, true_us: float, tokens: float) -> Finding:
    ratio = true_us / reported_us
    measured: Measured = {
        "reported_itl_us": reported_us,
        "true_gap_us": true_us,
        "ratio": ratio,
        "output_tokens": tokens,
        # Stamps of a request: its decode time over the reported gap, and one for the first.
        "events_per_token": (true_us * (tokens - 1) / reported_us + 1) / tokens,
    }
    if ratio > 1.5:
        return _two_events(measured, RULE)
    if 0.97 <= ratio <= 1.03:
        message = f"reported ITL {reported_us / 1e3:.2f} ms agrees with the true gap {true_us / 1e3:.2f} ms"
        return Finding(CHECK, "note", "itl", message, measured, "within 3 %")
    message = (
        f"reported ITL {reported_us / 1e3:.2f} ms, but (E2E-TTFT)/(n-1) is {true_us / 1e3:.2f} ms; the latter is used"
    )
    return Finding(CHECK, "corrected", "itl", message, measured, "more than 3 % apart")


def _two_events(measured: Measured, threshold: str) -> Finding:
    count = round(float(measured["events_per_token"] or 0))
    words = {2: "two", 3: "three"}.get(count, str(count))
    message = (
        f"reported ITL {float(measured['reported_itl_us'] or 0) / 1e3:.2f} ms, true gap {_ms(measured)}, "
        f"{words} stream events per token"
    )
    return Finding(CHECK, "corrected", "itl", message, measured, threshold)


def _ms(measured: Measured) -> str:
    return f"{float(measured['true_gap_us'] or 0) / 1e3:.2f} ms"
