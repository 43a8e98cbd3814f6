"""Check 9: prompt tokens that were computed against prompt tokens that were sent."""

from __future__ import annotations

import math

import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    decode_gap_us,
    mean,
    not_checked,
)
from blis_replay.ingest.checks.ledger import holds_the_run, step_totals
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.served import completed_requests, recorded_requests

CHECK = "prefix_cache"
MEASURES = "prompt tokens that were computed against prompt tokens that were sent"
RULE = (
    "scheduled prefill tokens scaled by the share of steps sampled, over requests; a few of them are decodes that "
    "asynchronous scheduling still counts as prefill (one token per request)"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Prefix-cache hit rate: per request where reported, else from step records, else an aggregate."""
    requests = recorded_requests(recording)
    prompts = requests.where("prompt_tokens > 0").frame(["prompt_tokens", "cached_prompt_tokens"])
    cached = prompts.drop_nulls("cached_prompt_tokens")
    if not cached.is_empty():
        return [_from_requests(cached)]
    if not recording.steps.is_empty() and not prompts.is_empty():
        finding = _from_steps(recording, prompts)
        if finding is not None:
            return [finding]
    if recording.prefix_hit_rate is not None:
        return [_from_aggregate(recording.prefix_hit_rate, prompts)]
    return _by_latency(recording)


_FEWEST = 20  # requests, and output tokens of one
_SURE = 2.0  # standard errors
MAY_BE_WARM = "us_per_prompt_token"  # measured where prompts are served faster than they can be computed
_FAST = 1 / 1500  # of a decode step: time per prompt token, where every prompt token is computed


def _by_latency(recording: Recording) -> list[Finding]:
    """Prompts that take too little time to be computed: only TTFT tells, and it tells a warm cache from nothing else.

    A step waits for all weights, a prompt token for its arithmetic with them; on every accelerator the former takes as
    long as some hundred of the latter.
    """
    names = ("prompt_tokens", "output_tokens", "ttft_us", "e2e_us")
    timed = completed_requests(recording, *names).drop_nulls().filter(pl.col("output_tokens") >= _FEWEST)
    gap_us = decode_gap_us(timed.with_columns(output_tokens_source=pl.lit("")))
    spread = timed.select(
        of_prompts=pl.col("prompt_tokens").var(),
        of_ttft=pl.col("ttft_us").var(),
        both=pl.cov("prompt_tokens", "ttft_us"),
    ).row(0)
    if timed.height < _FEWEST or not gap_us or not spread[0]:
        return [_nothing_counts_hits()]
    of_prompts, of_ttft, both = spread
    slope_us = both / of_prompts
    error_us = math.sqrt(max(of_ttft / of_prompts - slope_us**2, 0.0) / (timed.height - 2))
    if abs(slope_us) + _SURE * error_us >= _FAST * gap_us:
        return [_nothing_counts_hits()]
    message = (
        f"TTFT grows by {slope_us:.1f} us per prompt token, where a step takes {gap_us / 1e3:.1f} ms: a warm prefix "
        "cache or a fast prefill, which nothing here tells apart; record /metrics or a step log"
    )
    measured: Measured = {MAY_BE_WARM: slope_us, "standard_error_us": error_us, "gap_us": gap_us}
    rule = "time per prompt token, with two standard errors, below 1/1500 of a decode step"
    return [Finding(CHECK, "note", "ttft", message, measured, rule)]


def _nothing_counts_hits() -> Finding:
    return not_checked(CHECK, "ttft", "no step records, no cached-token counts and no published hit rate")


def uncached_prompt_tokens(recording: Recording) -> float | None:
    """Mean prompt tokens computed per request, from sampled step records; None without those of the whole run.

    Sampled steps over the range of step numbers is the sampling rate.
    """
    requests, totals = recorded_requests(recording), step_totals(recording)
    if totals is None or requests.is_empty() or not holds_the_run(recording):
        return None
    return totals.prefill_tokens / totals.rate / requests.height


def uncached_error_tokens(recording: Recording) -> float:
    """Standard error of the prompt tokens computed per request, where each step was drawn with the same chance."""
    requests, totals = recorded_requests(recording), step_totals(recording)
    return 0.0 if totals is None or requests.is_empty() else totals.prefill_error / requests.height


def _from_steps(recording: Recording, prompts: pl.DataFrame) -> Finding | None:
    uncached = uncached_prompt_tokens(recording)
    prompt = mean(prompts, "prompt_tokens")
    if uncached is None or not prompt:
        return None
    measured: Measured = {
        "uncached_tokens_per_request": uncached,
        "prompt_tokens_per_request": prompt,
        "hit_rate": 1 - uncached / prompt,
        "steps_sampled": recording.steps.height,
    }
    if uncached > 0.97 * prompt:
        message = (
            f"prompts were computed whole ({uncached:.1f} of {prompt:.1f} tokens per request): no prefix-cache hits"
        )
        return Finding(CHECK, "note", "ttft", message, measured, RULE)
    if uncached <= 0:
        return Finding(CHECK, "note", "ttft", "no prefill was sampled", measured, RULE)
    measured["times_too_much_prefill"] = prompt / uncached
    message = (
        f"{uncached:.1f} of {prompt:.1f} prompt tokens per request were computed (prefix-cache hit rate "
        f"{100 * (1 - uncached / prompt):.1f} %); a replay that ignores it prefills {prompt / uncached:.0f} times "
        "too much"
    )
    return Finding(CHECK, "note", "ttft", message, measured, RULE)


def _from_requests(requests: pl.DataFrame) -> Finding:
    prompt, cached = int(requests["prompt_tokens"].sum()), int(requests["cached_prompt_tokens"].sum())
    measured: Measured = {
        "requests": requests.height,
        "uncached_tokens_per_request": (prompt - cached) / requests.height,
        "prompt_tokens_per_request": prompt / requests.height,
        "hit_rate": cached / prompt,
    }
    message = f"the server reported {100 * cached / prompt:.1f} % of prompt tokens as cached, request by request"
    return Finding(CHECK, "note", "ttft", message, measured, "cached prompt tokens over prompt tokens")


def _from_aggregate(hit_rate: float, prompts: pl.DataFrame) -> Finding:
    prompt = mean(prompts, "prompt_tokens")
    measured: Measured = {
        "hit_rate": hit_rate,
        "prompt_tokens_per_request": prompt,
        "uncached_tokens_per_request": None if prompt is None else (1 - hit_rate) * prompt,
    }
    message = f"prefix-cache hit rate {100 * hit_rate:.1f} % is an aggregate; which requests hit is not identified"
    return Finding(CHECK, "note", "ttft", message, measured, "no step records and no cached tokens per request")
