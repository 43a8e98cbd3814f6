"""Check 1: how many stream stamps the client took per output token (trace-formats, 4.4)."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from blis_replay.ingest import served, stream
from blis_replay.ingest.checks import evidence
from blis_replay.ingest.recording import FIRST_TOKEN, Finding, Recording
from blis_replay.ingest.stream import BUNCHED, NO_EVENTS, Bunches, EventTotals, TokenLayout, bunches
from blis_replay.ingest.tables import Cell, Table, columns_named

CHECK = "token_events"
MEASURES = "stream stamps per output token, and the reported ITL against the true gap"
RULE = (
    "true gap / reported ITL above 1.5: one stamp per token gives 1.00, two give (2n+1)/(n-1), about 2.01 for n = 248"
)
LATE_RULE = (
    "no server knows at the first token how many will follow. Changes of TTFT from request to request must not follow "
    "changes of the output length (r 0.3, 5 standard errors, a tenth of the pace). A token takes 0.2 ms at least. "
    "From the engine to the client a first token is not two gaps longer on its way than a last one"
)
BUNCHED_RULE = (
    "a third of the streams begin with several events within 0.2 of a step and 1 ms, and so do a quarter of the later "
    "ones.  A first token comes alone, also where a step gives several"
)
_AGREES = 0.01
# No engine has a first token without a step; a busy client may stamp a few requests late.
_OF_A_STEP = 0.5  # of a request's own gap between tokens: an earlier event does not carry a token
_ENOUGH_TOKENS = 4  # output tokens from which a request has a gap to compare with
_MOST_EARLY = 0.01  # share of requests with such a first token
_FEWEST_EARLY = 5  # requests with one
# How tools that mean something else by the time per output token compute it.
_TPOT_DEFINITIONS = {
    "tpot_with_ttft_reported": "(last token - send) / n, with the time to the first token in it",
    "tpot_over_n_reported": "(last token - first token) / n, for n - 1 gaps",
}


def check(recording: Recording, context: evidence.Context) -> list[Finding]:
    """Reported ITL against the true gap, from the stamps or, without them, from aggregates; other notions of TPOT."""
    times = served.completed_requests(recording, "ttft_us", "e2e_us")
    if times["ttft_us"].null_count() == times.height > times["e2e_us"].null_count():
        return [Finding(CHECK, "note", "ttft", "nothing was streamed: no request has a TTFT, and E2E alone is judged")]
    if (late := stream.late_first_tokens(recording)) is not None:
        return [_late(late)]
    layout, totals = context.layout, context.events
    events = recording.token_events
    if layout == BUNCHED and events is not None and (bunched := bunches(events, recording.requests)) is not None:
        return [_in_bunches(bunched)]
    # Stamps of failed requests alone say less than aggregates over the others.
    if totals is not None and layout != NO_EVENTS and (totals.requests or not layout.identified):
        itl = _from_events(recording, layout, totals)
    else:
        itl = _from_aggregates(recording)
    others = [*_other_tpot(recording), *(_miscounted_tpot(recording) if itl.severity == "note" else [])]
    return [itl, *_before_any_step(recording), *_held_up(recording), *others]


def _late(late: stream.LateFirstTokens) -> Finding:
    """First tokens that are not first: what is left is E2E."""
    measured: evidence.Measured = vars(late)
    if late.comes_at_once:
        message = (
            f"streams come at once, {late.gap_us:.0f} us per token: a proxy holds them back, or nothing was streamed; "
            "TTFT and ITL are not used"
        )
    elif late.held_back_us is not None:
        message = (
            f"first tokens take {late.held_back_us / 1e3:.1f} ms longer than last ones from the engine to the client "
            f"({late.held_back_us / late.gap_us:.0f} gaps between tokens): a proxy collects tokens before it passes "
            "them on; TTFT and ITL are not used"
        )
    else:
        message = (
            f"TTFT grows by {late.us_per_token / 1e3:.2f} ms per output token of the request itself "
            f"(r {late.correlation:.2f}), so the first event is not the first token (reasoning without events, tokens "
            "held back); TTFT and ITL are not used"
        )
    return Finding(CHECK, "unusable", FIRST_TOKEN, message, measured, LATE_RULE)


def _in_bunches(bunched: Bunches) -> Finding:
    """Tokens that something held back until there were several, or until a time had passed."""
    message = (
        f"tokens come in bunches of {bunched.events_per_bunch:.1f} stream events, one every "
        f"{bunched.every_us / 1e3:.0f} ms; {100 * bunched.begin_with_one:.0f} % of the streams begin with a bunch, so "
        "the first stamp is later than the first token (a proxy or the client holds tokens back); TTFT and ITL are not "
        "used"
    )
    return Finding(CHECK, "unusable", FIRST_TOKEN, message, {**vars(bunched)}, BUNCHED_RULE)


def evidence_tables(recording: Recording, context: evidence.Context) -> tuple[Table, ...]:
    """The histogram of gaps between stamps with its modes; published quantiles where no stamp was kept."""
    if context.stamp_gaps is not None and not context.stamp_gaps.is_empty():
        bins = tuple((_gap(low_us), count) for low_us, count in context.stamp_gaps.iter_rows())
        note = "two stamps per token make two modes: some tens of us, and a step"
        return (
            Table(
                "gaps between stream stamps",
                columns_named("gap from", "gaps"),
                bins,
                bars="gaps",
                note=note,
            ),
        )
    reported = {
        name: served.published(recording.aggregates, -1, "itl_reported", name)
        for name in ("p50", *served.PAIRED_QUANTILES, "mean")
    }
    true = served.published_itl(recording.aggregates, -1, evidence.true_output_tokens(recording))
    paired = served.is_paired(recording.aggregates, -1, evidence.true_output_tokens(recording))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, value / 1e3, served.PAIRED_QUANTILES.get(name, "") if paired else name, _in_ms(true, name, paired))
        for name, value in reported.items()
        if value is not None and name != "max"  # one stall would dwarf all others
    )
    if not rows:
        return ()
    note = "a median far below p75 is the blank line after each token: half of these gaps are not between tokens"
    columns = ("reported", "ms", "stands for", "true ms")
    return (Table("published ITL", columns_named(*columns), rows, bars="ms", note=note if paired else ""),)


def _gap(low_us: float) -> str:
    return f"{low_us / 1e3:.3g} ms" if low_us >= 1000 else f"{low_us:.0f} us"


def _in_ms(true: dict[str, float], reported: str, paired: bool) -> float | None:
    value_us = true.get(served.PAIRED_QUANTILES.get(reported, "") if paired else reported)
    return None if value_us is None else value_us / 1e3


def _from_events(recording: Recording, layout: TokenLayout, totals: EventTotals) -> Finding:
    per_token = totals.stamps / totals.tokens if totals.tokens else None
    measured: evidence.Measured = {
        "layout": layout.name,
        "requests": totals.requests,
        "events_per_token": per_token,
        "reported_itl_us": served.published(recording.aggregates, -1, "itl_reported", "mean") or totals.stamped_gap_us,
        "true_gap_us": totals.token_gap_us,
    }
    if not layout.identified:
        return _several_tokens(measured, evidence.recorded_decode_gap_us(recording))
    if totals.token_gap_us is None or totals.stamped_gap_us is None:
        return evidence.not_checked(CHECK, "itl", "no completed request has two output tokens")
    if layout.stamps_per_token > 1:
        rule = "2n to 2n+3 stamps for n tokens, gaps alternating between under 0.2 ms and a step"
        return _two_events(measured, rule)
    if layout.leading_events:
        message = f"the first stream event carries the role and no token, and is left out: {_both(measured)}"
        return Finding(CHECK, "corrected", "itl", message, measured, "most requests begin with two events at once")
    if layout.closing_events:
        message = f"one stream event per token and a closing one, which is left out: {_both(measured)}"
        return Finding(
            CHECK, "corrected", "itl", message, measured, "most requests end with an event that is not a token"
        )
    return _one_by_one(measured, totals.token_gap_us, evidence.recorded_decode_gap_us(recording))


def _several_tokens(measured: evidence.Measured, mean_gap_us: float | None) -> Finding:
    measured = {**measured, "true_gap_us": mean_gap_us}
    message = (
        "some stream events carry several tokens, or tokens had no event: single gaps cannot be told, only the mean"
    )
    if mean_gap_us is not None:
        message += f"; {_both(measured)}"
    rule = "the median request has an event for fewer than 98 % of its tokens"
    return Finding(CHECK, "unusable", "itl quantiles", message, measured, rule)


def _one_by_one(measured: evidence.Measured, pooled_us: float, by_request_us: float | None) -> Finding:
    """A published mean is over all gaps, or over the means of requests: it may agree with either."""
    true_us = [gap_us for gap_us in (pooled_us, by_request_us) if gap_us is not None]
    reported_us = float(measured["reported_itl_us"] or 0)
    if any(abs(reported_us - gap_us) <= _AGREES * gap_us for gap_us in true_us):
        message = f"one stream event per token, mean gap {pooled_us / 1e3:.2f} ms"
        return Finding(CHECK, "note", "itl", message, measured, "the median request has one stamp per token")
    message = f"one stream event per token, and the stamps are used: {_both(measured)}"
    return Finding(CHECK, "corrected", "itl", message, measured, "more than 1 % apart")


_GAP_US = (pl.col("e2e_us") - pl.col("ttft_us")) / (pl.col("output_tokens") - 1)


def _of_several_tokens(recording: Recording) -> pl.DataFrame:
    requests = served.completed_requests(recording, "request_index", "output_tokens", "ttft_us", "e2e_us").drop_nulls()
    return requests.filter(pl.col("output_tokens") >= _ENOUGH_TOKENS)


def _held_up(recording: Recording) -> list[Finding]:
    """Requests whose tokens came all at once, in a run where others did not."""
    several = _of_several_tokens(recording)
    at_once = several.filter(_GAP_US.is_between(0, served.NO_STEP_US, closed="left")).height
    if at_once in (0, several.height):  # where all came so nothing was streamed
        return []
    message = (
        f"{at_once} of {several.height} requests got their tokens all at once, in under {served.NO_STEP_US / 1e3:g} ms "
        "per token: the client or a front end stood still, and made their TTFT longer and their ITL shorter"
    )
    return [Finding(CHECK, "note", "ttft", message, {"requests": at_once, "of": several.height}, LATE_RULE)]


def _before_any_step(recording: Recording) -> list[Finding]:
    """First tokens that came sooner than a step can compute one: the first event of a stream has only a role."""
    several, gap_us = _of_several_tokens(recording), _GAP_US
    early = several.filter((pl.col("ttft_us") >= 0) & (pl.col("ttft_us") < _OF_A_STEP * gap_us))
    median_ttft_us, median_gap_us = early.select(pl.col("ttft_us").median(), gap_us.median().alias("gap_us")).row(0)
    if early.height <= max(_MOST_EARLY * several.height, _FEWEST_EARLY):
        return []
    measured: evidence.Measured = {
        "requests": early.height,
        "of": several.height,
        "median_ttft_us": median_ttft_us,
        "median_gap_us": median_gap_us,
    }
    message = (
        f"{early.height} of {several.height} requests have their first token after {median_ttft_us / 1e3:.2f} ms, less "
        f"than half of a step ({median_gap_us / 1e3:.2f} ms per token): the event that was stamped carries a role and "
        "no token"
    )
    rule = f"a token takes a step: TTFT below {_OF_A_STEP} of a request's own gap between tokens, in 1 % of them"
    return [Finding(CHECK, "unusable", "ttft", message, measured, rule)]


def _other_tpot(recording: Recording) -> Iterator[Finding]:
    """Time per output token by a definition of the tool's own: no error, but not to be compared with others."""
    for metric, definition in _TPOT_DEFINITIONS.items():
        reported_us = served.published(recording.aggregates, -1, metric, "mean")
        true_us = None if reported_us is None else evidence.recorded_decode_gap_us(recording)
        if reported_us is None or true_us is None:
            continue
        measured: evidence.Measured = {"reported_tpot_us": reported_us, "true_gap_us": true_us}
        message = (
            f"reported TPOT {reported_us / 1e3:.2f} ms is {definition}; "
            f"(E2E - TTFT) / (n - 1) is {true_us / 1e3:.2f} ms, and is what is used here"
        )
        yield Finding(CHECK, "note", "tpot", message, measured, "the tool defines TPOT like this")


def _miscounted_tpot(recording: Recording) -> list[Finding]:
    """Time per output token over a count that is not the decoded one, where the ITL itself is right."""
    reported_us = served.published(recording.aggregates, -1, "tpot_reported", "mean")
    true_us = None if reported_us is None else evidence.recorded_decode_gap_us(recording)
    if reported_us is None or true_us is None or abs(reported_us - true_us) <= _AGREES * true_us:
        return []
    measured: evidence.Measured = {"reported_tpot_us": reported_us, "true_gap_us": true_us}
    message = f"reported TPOT {reported_us / 1e3:.2f} ms, but (E2E-TTFT)/(n-1) is {true_us / 1e3:.2f} ms and is used"
    return [Finding(CHECK, "corrected", "tpot", message, measured, "more than 1 % apart, while the ITL agrees")]


def _from_aggregates(recording: Recording) -> Finding:
    reported_us = served.published(recording.aggregates, -1, "itl_reported", "mean")
    if not reported_us:
        return evidence.not_checked(CHECK, "itl", "no stream events and no published ITL")
    tokens = evidence.true_output_tokens(recording)
    # From published means, which the requests of a recording reproduce.
    true_us = served.true_mean_gap_us(recording.aggregates, -1, tokens) or evidence.recorded_decode_gap_us(recording)
    if true_us is None or tokens is None:
        if not served.is_paired(recording.aggregates):
            return evidence.not_checked(CHECK, "itl", "no true output length to compare the published ITL with")
        message = "the published ITL pools two stream events per token; its mean is about half the true gap"
        measured: evidence.Measured = {"reported_itl_us": reported_us, "true_gap_us": None, "events_per_token": None}
        return Finding(CHECK, "unusable", "itl", message, measured, "published ITL: median below 5 % of p75")
    return _compare(reported_us, true_us, tokens)


def _compare(reported_us: float, true_us: float, tokens: float) -> Finding:
    ratio = true_us / reported_us
    measured: evidence.Measured = {
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


def _two_events(measured: evidence.Measured, threshold: str) -> Finding:
    count = round(float(measured["events_per_token"] or 0))
    words = {2: "two", 3: "three"}.get(count, str(count))
    message = f"{_both(measured)}, {words} stream events per token"
    return Finding(CHECK, "corrected", "itl", message, measured, threshold)


def _both(measured: evidence.Measured) -> str:
    reported_us, true_us = (float(measured[name] or 0) for name in ("reported_itl_us", "true_gap_us"))
    return f"reported ITL {reported_us / 1e3:.2f} ms, true gap {true_us / 1e3:.2f} ms"
