"""Check 2: output lengths counted by tokenising the returned text again."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured, not_checked, true_output_tokens
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.served import completed_requests, published

CHECK = "output_length"
MEASURES = "reported output lengths against those that were decoded"
RULE = "any request whose re-tokenised count differs from the length it decoded (ignore_eos, or server usage)"

_FOLLOWS = 0.9  # correlation with decode time: reported lengths from here on are what was decoded
_FOLLOWS_LESS = 0.2  # by which the correlation of the requested lengths must be lower
_FEWEST = 20  # requests for a correlation

_LENGTHS = (
    *("output_tokens", "output_tokens_source", "output_tokens_reported"),
    *("prompt_tokens", "ttft_us", "e2e_us"),
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Reported lengths against true ones: mean deficit, share with a deficit above 10 %, zeros."""
    requests = completed_requests(recording, *_LENGTHS)
    if requests.is_empty():
        return [_from_aggregates(recording)]
    trusted = requests.filter(
        pl.col("output_tokens").is_not_null() & pl.col("output_tokens_source").ne_missing("re-tokenised")
    )
    if trusted.is_empty():
        return [_only_retokenised(requests)]
    compared = trusted.drop_nulls("output_tokens_reported")
    if compared.is_empty():
        if contradicted := _contradicted(trusted):
            return contradicted
        source = trusted["output_tokens_source"][0] or "the recording"
        message = f"output length from {source}; no re-tokenised count to compare with"
        return [Finding(CHECK, "note", "output_tokens", message, {"requests": trusted.height})]
    return [*_contradicted(compared), _compare(compared)]


def _contradicted(requests: pl.DataFrame) -> list[Finding]:
    """A client's setting against the time that decoding took."""
    source = str(requests["output_tokens_source"][0] or "")
    if "ignore_eos" not in source:
        return []
    reported = _of_decode_time(requests)
    asked = _correlation(requests, pl.col("output_tokens"), pl.col("e2e_us") - pl.col("ttft_us"))
    if (
        requests.height < _FEWEST
        or reported is None
        or reported < _FOLLOWS
        or (asked is not None and asked > reported - _FOLLOWS_LESS)
    ):
        return []
    measured: Measured = {
        "correlation_of_reported": reported,
        "correlation_of_asked": asked,
        "reported_mean_tokens": float(requests.select(pl.col("output_tokens_reported").mean()).item()),
        "asked_mean_tokens": float(requests.select(pl.col("output_tokens").mean()).item()),
    }
    message = (
        f"decode time follows the reported lengths (r {reported:.2f}, mean "
        f"{measured['reported_mean_tokens']:.1f} tokens), and not those that the client asked for "
        f"({measured['asked_mean_tokens']:.1f}): ignore_eos was not in force; what is replayed is not what was decoded"
    )
    rule = (
        f"a setting is believed while nothing measured contradicts it: r of {_FOLLOWS} with the reported lengths does"
    )
    return [Finding(CHECK, "unusable", "", message, measured, rule)]


def _compare(requests: pl.DataFrame) -> Finding:
    short = 1 - pl.col("output_tokens_reported") / pl.col("output_tokens")
    row = requests.select(
        pl.col("output_tokens").mean().alias("true_mean_tokens"),
        pl.col("output_tokens_reported").mean().alias("reported_mean_tokens"),
        (100 * (1 - pl.col("output_tokens_reported").mean() / pl.col("output_tokens").mean())).alias("short_percent"),
        (short > 0.10).mean().alias("share_over_10_percent_short"),
        (pl.col("output_tokens_reported") == 0).sum().alias("zeros"),
        (pl.col("output_tokens_reported") != pl.col("output_tokens")).sum().alias("differing"),
    ).row(0, named=True)
    source = requests["output_tokens_source"][0] or "the recording"
    measured = {
        **row,
        "source": source,
        "requests": requests.height,
        "correlation_with_decode_time": _of_decode_time(requests),
    }
    if row["differing"] == 0:
        message = f"reported output lengths equal the true ones ({source})"
        return Finding(CHECK, "note", "output_tokens", message, measured, RULE)
    side = "short" if row["short_percent"] >= 0 else "long"
    message = (
        f"re-tokenised output lengths are {abs(row['short_percent']):.1f} % {side} on average "
        f"({row['reported_mean_tokens']:.1f} of {row['true_mean_tokens']:.1f} tokens), "
        f"{100 * row['share_over_10_percent_short']:.0f} % of requests more than 10 % below, {row['zeros']} at zero; "
        f"the true length is used ({source})"
    )
    return Finding(CHECK, "corrected", "output_tokens", message, measured, RULE)


def _of_decode_time(requests: pl.DataFrame) -> float | None:
    """Pearson's r of reported lengths with decode times: about 0 says that the count is not what was decoded."""
    return _correlation(requests, pl.col("output_tokens_reported"), pl.col("e2e_us") - pl.col("ttft_us"))


def _correlation(requests: pl.DataFrame, tokens: pl.Expr, time_us: pl.Expr) -> float | None:
    pairs = requests.select(tokens.cast(pl.Float64).alias("n"), time_us.cast(pl.Float64).alias("us")).drop_nulls()
    if pairs.height < 3 or pairs["n"].n_unique() < 2 or pairs["us"].n_unique() < 2:
        return None
    return float(pairs.select(pl.corr("n", "us")).item())


def _only_retokenised(requests: pl.DataFrame) -> Finding:
    counted = requests["output_tokens"].drop_nulls().len() + requests["output_tokens_reported"].drop_nulls().len()
    if counted == 0:
        message = "no output length was recorded; token gaps, TPOT and an exact replay are not possible"
    else:
        message = "only re-tokenised output lengths are known; token gaps, TPOT and the replayed lengths are doubtful"
    measured: Measured = {
        "requests": requests.height,
        "correlation_with_decode_time": _of_decode_time(requests),
    }
    rule = (
        "re-tokenised counts were 20-26 % too low for Llama-2-7B; server usage or max_tokens with ignore_eos is needed"
    )
    return Finding(CHECK, "unusable", "output_tokens", message, measured, rule)


def _from_aggregates(recording: Recording) -> Finding:
    reported = published(recording.aggregates, -1, "output_tokens_reported", "mean")
    true = true_output_tokens(recording)
    if recording.requests["arrival_within_us"].count():
        return not_checked(CHECK, "output_tokens", "lengths are those that the server counted")
    if reported is None or true is None:
        return not_checked(CHECK, "output_tokens", "no completed requests, or no published output length")
    short = 100 * (1 - reported / true)
    measured: Measured = {
        "true_mean_tokens": true,
        "reported_mean_tokens": reported,
        "short_percent": short,
    }
    if abs(short) < 0.05:
        message = f"the published mean output length equals the true one ({true:g} tokens)"
        return Finding(CHECK, "note", "output_tokens", message, measured, RULE)
    side = "short" if short >= 0 else "long"
    message = (
        f"the published mean output length is {abs(short):.1f} % {side} ({reported:.1f} of {true:g} tokens); "
        "the configured length is used (ignore_eos)"
    )
    return Finding(CHECK, "corrected", "output_tokens", message, measured, RULE)
