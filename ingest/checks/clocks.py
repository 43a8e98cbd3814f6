"""Check 6: negative segments, mixed stamps, and the step clock beside that of the requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured
from blis_replay.ingest.recording import ESTIMATED, IDENTITIES, NOT_KNOWN, Clock, Finding, Recording, Severity
from blis_replay.ingest.served import completed_requests, published, recorded_requests
from blis_replay.ingest.steps.clock_offset import MIXED_US, DepthOffset, estimate_offset

CHECK = "clocks"
MEASURES = "segments that cannot be, stamps of different clocks in one difference, the step clock's offset and drift"
RULE = (
    "0 <= TTFT <= E2E for every request, its server segments not negative and no longer than its E2E; no difference "
    "of 30 days, as between a monotonic and an epoch stamp. The engine admits a request after the client sent it, and"
    " ends it before the client has it: that bounds the offset of the steps. Stamps outside of the bounds by 10 ms "
    "are not believed; halves of a run whose bounds do not meet have clocks that drift"
)
_ROUNDING_US = 1_000
# Beyond it the cycles of one load level are taken for those of another.
_DRIFTS_US = 200_000
_MOST_IMPOSSIBLE = 0.02  # share of pairs of client and server stamps that cannot be; with more the pairing is wrong
_FEWEST_PAIRS = 20  # pairs, or requests, for a finding
# A mean that cannot be by less than this share of it is still used.
_TOO_SHORT = 0.01
_GRAIN_US = 100_000  # send stamps in coarser steps, where
_SHARED_STAMPS = 0.2  # more than this share has the stamp of another request, are not those of a load
_COARSE = 0.1  # of the mean: where half a step of latencies is more, they are too coarse to be judged
_FEWEST_VALUES = 3  # distinct latencies from which they have a step
_COARSE_RULE = "latencies in steps of 1 ms and coarser; half a step is at most 10 % of the mean"
_SEGMENTS = ("queue_us", "prefill_us", "decode_us")


def check(recording: Recording, context: Context) -> list[Finding]:
    """Impossible times, and how the step clock was placed with both numbers; one note if nothing is amiss."""
    requests = completed_requests(recording, "request_index", "ttft_us", "e2e_us", *_SEGMENTS)
    wrong = [*_latencies(requests), *_segments(requests), *_mixed(recording), *_published(recording)]
    coarse = [*_coarse(recording), *_coarse_latencies(requests)]
    findings = [*wrong, *coarse, *_causality(recording), *_server_clock(recording), *_step_clock(recording)]
    return findings or [Finding(CHECK, "note", "", "no segment is negative, no stamps are mixed", {}, RULE)]


def _latencies(requests: pl.DataFrame) -> Iterator[Finding]:
    crossed = requests.filter(pl.col("ttft_us") > pl.col("e2e_us"))["request_index"]
    for metric in ("ttft", "e2e"):
        negative = requests.filter(pl.col(f"{metric}_us") < 0)["request_index"]
        bad = pl.concat([negative, crossed]).unique().sort()
        if bad.is_empty():
            continue
        measured: Measured = {
            "requests": len(bad),
            "negative": len(negative),
            "ttft_above_e2e": len(crossed),
            "first_request_index": int(bad[0]),
        }
        message = (
            f"{len(negative)} completed requests have a {metric.upper()} below 0, {len(crossed)} a TTFT above their "
            f"E2E, first {bad[0]}"
        )
        yield Finding(CHECK, "unusable", metric, message, measured, RULE)


def _segments(requests: pl.DataFrame) -> list[Finding]:
    """Server segments, which no metric uses but attribution."""
    total = pl.sum_horizontal(_SEGMENTS)
    measured: Measured = {f"negative_{name}": int((requests[name] < 0).sum()) for name in _SEGMENTS}
    measured["longer_than_e2e"] = requests.filter(total > pl.col("e2e_us") + _ROUNDING_US).height
    if not any(measured.values()):
        return []
    listed = ", ".join(
        f"{count} {name.replace('_us', '').replace('_', ' ')}" for name, count in measured.items() if count
    )
    message = f"queue, prefill and decode times of the server cannot be: {listed}"
    return [Finding(CHECK, "unusable", "segments", message, measured, RULE)]


def _mixed(recording: Recording) -> Iterator[Finding]:
    requests = recorded_requests(recording)
    for metric, column in (("ttft", "ttft_us"), ("e2e", "e2e_us"), ("", "arrival_us")):
        bad = int((requests[column].abs() > MIXED_US).sum())
        if bad:
            what = "were sent" if not metric else f"have a {metric.upper()} of"
            message = f"{bad} requests {what} more than 30 days apart: epoch and monotonic stamps are mixed"
            yield Finding(CHECK, "unusable", metric, message, {"requests": bad}, RULE)


def _published(recording: Recording) -> Iterator[Finding]:
    if recorded_requests(recording).height:
        return
    ttft, e2e = (published(recording.aggregates, -1, metric, "mean") for metric in ("ttft", "e2e"))
    for metric in ("ttft", "e2e"):
        least = published(recording.aggregates, -1, metric, "min")
        negative = least is not None and least < 0
        crossed = ttft is not None and e2e is not None and ttft > e2e
        if negative or crossed:
            message = (
                f"the published {metric.upper()} cannot be: minimum {_ms(least)}, mean TTFT {_ms(ttft)}, E2E {_ms(e2e)}"
            )
            measured: Measured = {"min_us": least, "mean_ttft_us": ttft, "mean_e2e_us": e2e}
            yield Finding(CHECK, "unusable", metric, message, measured, RULE)


def _coarse(recording: Recording) -> list[Finding]:
    """Sends whose stamps are multiples of a long time: replayed like that, they come in bursts."""
    sends_us = recorded_requests(recording)["arrival_us"].drop_nulls().to_numpy()
    # Without latencies nothing is judged by sends.
    if len(sends_us) < _FEWEST_PAIRS or recording.requests["e2e_us"].null_count() == recording.requests.height:
        return []
    grain_us = int(np.gcd.reduce(sends_us))
    if grain_us < _GRAIN_US:
        return []
    shared = 1 - len(np.unique(sends_us)) / len(sends_us)
    if shared < _SHARED_STAMPS:
        return []
    measured: Measured = {"grain_us": grain_us, "share_with_the_stamp_of_another": shared}
    message = (
        f"sends are stamped in steps of {_ms(grain_us)}, and {100 * shared:.0f} % share their stamp with another: the "
        "order and the bursts of a replay are not those of the load"
    )
    return [Finding(CHECK, "unusable", "", message, measured, "stamps of 0.1 s and coarser, shared by a fifth")]


def _coarse_latencies(requests: pl.DataFrame) -> Iterator[Finding]:
    """TTFT and E2E in coarse steps (half a step is a good part of the mean): the client polls."""
    latencies = requests.select("ttft_us", "e2e_us").drop_nulls()
    # Equal latencies have no step.
    if latencies.height < _FEWEST_PAIRS or latencies["e2e_us"].n_unique() < _FEWEST_VALUES:
        return
    grain_us = int(np.gcd.reduce(latencies.to_numpy(), axis=None))
    for metric in ("ttft", "e2e") if grain_us >= _ROUNDING_US else ():
        share = grain_us / 2 / max(float(latencies[f"{metric}_us"].to_numpy().mean()), 1.0)
        if share > _COARSE:
            message = (
                f"{metric.upper()} comes in steps of {_ms(grain_us)}, half of it is {100 * share:.0f} % of its mean: "
                "the client looked only that often, so it is late by as much, or early if it rounds down"
            )
            measured: Measured = {"grain_us": grain_us, "half_a_step_of_the_mean": share}
            yield Finding(CHECK, "unusable", metric, message, measured, _COARSE_RULE)


def _causality(recording: Recording) -> list[Finding]:
    """Journeys that begin before their request was sent, or have a token after the client had it."""
    sent = completed_requests(recording, "request_index", "arrival_us", "ttft_us", "e2e_us")
    first = pl.col("arrival_us") + pl.col("ttft_us") - pl.col("first_token_us")
    last = pl.col("arrival_us") + pl.col("e2e_us") - pl.col("finished_us")
    margins = pl.concat(
        both.select(
            (pl.min_horizontal("arrived_us", "queued_us") - pl.col("arrival_us")).alias("there"),
            pl.min_horizontal(first, last).alias("back"),
        )
        for both in _beside_journeys(recording, sent)
    )
    there_us, back_us = margins["there"].drop_nulls(), margins["back"].drop_nulls()
    if len(there_us) < _FEWEST_PAIRS or len(back_us) < _FEWEST_PAIRS:
        return []
    # 98 % of the pairs bound what the server's clock is ahead by; single stamps are off by more.
    least_us, most_us = -float(back_us.quantile(0.01) or 0), float(there_us.quantile(0.01) or 0)
    known = max((clock.uncertainty_us or 0 for clock in recording.clocks), default=0)
    allowed_us = max(_ROUNDING_US, 2 * known)
    early, late = int((there_us < -allowed_us).sum()), int((back_us < -allowed_us).sum())
    if max(early / len(there_us), late / len(back_us)) <= _MOST_IMPOSSIBLE:
        return []
    measured: Measured = {
        "before_their_send": early,
        "after_the_client": late,
        "requests": len(there_us),
        "ahead_at_least_us": least_us,
        "ahead_at_most_us": most_us,
    }
    what = f"{early} of {len(there_us)} requests reach the server before they are sent" if early else ""
    token = f"{late} have a token at the client before the server has it" if late else ""
    ahead, both = _ahead(least_us, most_us), pl.concat(_beside_journeys(recording, sent))
    message = f"{' and '.join(part for part in (what, token) if part)}: {ahead}; the server's times are not used"
    return [Finding(CHECK, "unusable", "segments", message, measured, RULE), *_too_short(both, sent.height)]


def _beside_journeys(recording: Recording, sent: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The requests ``sent`` beside the stamps of their journeys, one batch of these after the other."""
    for batch in recording.lifecycles.batches(
        ["request_index", "arrived_us", "queued_us", "first_token_us", "finished_us"]
    ):
        yield sent.join(batch.drop_nulls("request_index"), on="request_index")


def _too_short(both: pl.DataFrame, requests: int) -> Iterator[Finding]:
    """Client latencies that are shorter in the mean than what the server alone took: whatever the clocks, and whoever
    is paired with whom, sends are stamped late or tokens early.  ``requests``: how many the client completed.
    """
    for metric, mark in (("ttft", "first_token_us"), ("e2e", "finished_us")):
        pairs = both.select(f"{metric}_us", (pl.col(mark) - pl.col("arrived_us")).alias("server_us")).drop_nulls()
        left_us = (pairs[f"{metric}_us"] - pairs["server_us"]).to_numpy()
        if len(left_us) < _FEWEST_PAIRS:
            continue
        mean_us, client_us = float(left_us.mean()), float(pairs[f"{metric}_us"].mean())  # type: ignore[arg-type]
        # Over all requests the mean is exact; over a sample it has a standard error.
        whole = len(left_us) >= (1 - _MOST_IMPOSSIBLE) * requests
        error_us = 0.0 if whole else float(left_us.std()) / len(left_us) ** 0.5
        if mean_us + 2 * error_us > -max(_ROUNDING_US, _TOO_SHORT * client_us):
            continue
        measured: Measured = {"client_us": client_us, "too_short_us": -mean_us, "requests": len(left_us)}
        message = (
            f"the mean {metric.upper()} is at least {_ms(-mean_us)} too short: the client has {_ms(client_us)}, and "
            f"the server alone took {_ms(client_us - mean_us)}, whatever the clocks are; stamp sends before they leave"
        )
        yield Finding(CHECK, "unusable", metric, message, measured, RULE)


def _ahead(least_us: float, most_us: float) -> str:
    """What the bounds say of the two clocks."""
    if least_us > most_us:
        return "no offset of the two clocks makes it possible, so sends or tokens are stamped at other times"
    middle_us = (least_us + most_us) / 2
    side = "ahead of" if middle_us > 0 else "behind"
    return f"the server's clock is {_ms(abs(middle_us))} {side} the client's, or sends are stamped late"


def _server_clock(recording: Recording) -> list[Finding]:
    """The server's clock beside the client's, by requests that both recorded."""
    client = recording.clock("client")
    paired = next((clock for clock in recording.clocks if clock.placed == IDENTITIES), None)
    if paired is None:
        return []
    ahead_us = paired.zero_us - client.zero_us if client is not None and client.kind == paired.kind else None
    measured: Measured = {"server_ahead_us": ahead_us, "uncertainty_us": paired.uncertainty_us}
    said = "lies beside the client's" if ahead_us is None else f"is {_ms(ahead_us)} ahead of the client's"
    message = f"the server's clock {said}, ±{_ms(paired.uncertainty_us)}, by the requests that both recorded"
    rule = "a server has a request after its send, and its first token before the client: each pair bounds the offset"
    return [Finding(CHECK, "note", "", message, measured, rule)]


def _step_clock(recording: Recording) -> list[Finding]:
    clock = recording.clock("step")
    if clock is None or recording.steps.is_empty() or recorded_requests(recording).is_empty():
        return []
    by_depth, why = estimate_offset(recording.steps, recorded_requests(recording))
    measured = _measured(recording, clock, by_depth)
    severity: Severity = "corrected" if clock.placed == ESTIMATED else "note"
    metric, message = "", _placement(clock, measured, why)
    if by_depth is not None and clock.placed not in ("", ESTIMATED, NOT_KNOWN) and not by_depth.fits_at_zero:
        severity, metric = "unusable", "step_time"
        message = (
            f"the steps do not fit the requests as their stamps say: by running depth they are stamped "
            f"{_ms(abs(by_depth.offset_us))} {'early' if by_depth.offset_us > 0 else 'late'}, "
            f"±{_ms(by_depth.uncertainty_us)}; step times are not used"
        )
    placed = Finding(CHECK, severity, metric, message, measured, RULE)
    return [placed, *([] if by_depth is None else _drift(by_depth))]


def _measured(recording: Recording, clock: Clock, by_depth: DepthOffset | None) -> Measured:
    """First step after the first send, in us, by the stamps and by depth."""
    first_us = int(recording.steps.aggregate(first="coalesce(min(start_us), 0)")["first"])
    stamped_us = clock.stamped_zero_us
    return {
        "placed": clock.placed or NOT_KNOWN,
        "constructed": int(clock.constructed),
        "first_step_stamped_us": None if stamped_us is None else first_us + clock.zero_us - stamped_us,
        "first_step_by_depth_us": None if by_depth is None else first_us + by_depth.offset_us,
        "uncertainty_us": None if by_depth is None else by_depth.uncertainty_us,
        "explained_share_of_depth": None if by_depth is None else by_depth.explained,
    }


def _placement(clock: Clock, measured: Measured, why: str) -> str:
    said, depth = measured["first_step_stamped_us"], measured["first_step_by_depth_us"]
    by_depth = (
        f"running depth cannot tell ({why})"
        if depth is None
        else f"by running depth {_ms(depth)} ±{_ms(measured['uncertainty_us'])}"
    )
    stamps = "constructed stamps" if clock.constructed else "stamps"
    by_stamps = f"no {stamps}" if said is None else f"by {stamps} {_ms(said)}"
    head = f"from the first send to the first step that was recorded: {by_stamps}, {by_depth}"
    if clock.placed == ESTIMATED:
        return f"{head}; the latter is used"
    if clock.placed in ("", NOT_KNOWN):
        return f"{head}; the first step is shown at the first send"
    return f"{head}; the steps are placed as {clock.placed}" if said is None else f"{head}; the stamps are used"


def _drift(by_depth: DepthOffset) -> list[Finding]:
    early, late = by_depth.early_us, by_depth.late_us
    if max(early[0], late[0]) <= min(early[1], late[1]):
        return []
    drift_us = (sum(late) - sum(early)) // 2
    message = f"step and request clocks drift apart: by {_ms(drift_us)} from the first to the second half of the steps"
    measured: Measured = {
        "drift_us": drift_us,
        "early_low_us": early[0],
        "early_high_us": early[1],
        "late_low_us": late[0],
        "late_high_us": late[1],
    }
    far = abs(drift_us) > _DRIFTS_US
    if far:
        message += "; step times are not used"
    return [Finding(CHECK, "unusable" if far else "note", "step_time" if far else "", message, measured, RULE)]


def _ms(value_us: float | int | str | None) -> str:
    return "unknown" if value_us is None else f"{float(value_us) / 1e3:.1f} ms"
