"""What a recording says of each number of the metric table, or why it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest.recording import FIRST_TOKEN, OVERLOAD_CHECK, REBUILT_E2E, STAMPS, WAY, Finding, Recording
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.served import published_itl
from blis_replay.ingest.store import Store, read_stored
from blis_replay.ingest.store.recordings import inter_token_gaps
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import STATISTICS, LatencySamples, pooled_quantiles, statistics

Gaps = tuple[Int64s, Int64s]


@dataclass(frozen=True)
class Selection:
    """Which requests to compare: a load stage, and a window of the run by arrival (0..1)."""

    stage: int | None = None
    window: tuple[float, float] = (0.0, 1.0)

    def of(self, requests: Rows) -> Bools:
        """bool[n]: the requests that belong to the selection."""
        arrival_us = requests["arrival_us"].to_numpy()
        last_us = float(arrival_us[-1]) if len(arrival_us) else 0.0
        low, high = (share * last_us for share in self.window)
        within = (arrival_us >= low) & (arrival_us <= high)
        if self.stage is None:
            return np.asarray(within, np.bool_)
        return np.asarray(within & (requests["stage"] == self.stage).fill_null(False).to_numpy(), np.bool_)

    @property
    def everything(self) -> bool:
        """Whether all requests belong to it."""
        return self.stage is None and self.window == (0.0, 1.0)


@dataclass(frozen=True)
class Number:
    """One number of one side in us; None with the ``reason`` if not available.

    ``between_us``: bounds, where only those are known.  ``unusable``: the instrument check that forbids the number.
    ``derived``: how it follows from other numbers, where the recording does not state it.
    """

    value_us: float | None
    reason: str | None = None
    between_us: tuple[float, float] | None = None
    unusable: str | None = None
    derived: str = ""


Numbers = dict[str, dict[str, Number]]


def pooled_gaps(store: Store, slug: str, chosen: Bools | None = None) -> Gaps | None:
    """Gaps between output tokens of the chosen requests (all if None); None where no token times were recorded."""
    gaps = inter_token_gaps(store, slug, chosen)
    return gaps if len(gaps[0]) else None


@dataclass(frozen=True)
class Observed:
    """A recording with all that comparing a replay of its whole run takes.

    ``token_gaps``: pooled gaps between output tokens, None where no token times were recorded.
    """

    recording: Recording
    token_gaps: Gaps | None

    @property
    def overloaded(self) -> bool:
        """Whether an instrument check calls the recording overloaded."""
        return overloaded(self.recording.findings)


def read_observed(store: Store, slug: str) -> Observed:
    """A stored experiment; raises ``UnknownExperimentError`` for an unknown slug."""
    return Observed(read_stored(store, slug), pooled_gaps(store, slug))


def overloaded(findings: Iterable[Finding]) -> bool:
    """Whether an instrument check calls the recording overloaded."""
    return any(finding.check == OVERLOAD_CHECK for finding in findings)


def observed_requests(recording: Recording) -> Bools:
    """bool[n]: requests that succeeded and whose TTFT and E2E were recorded; E2E, where nothing was streamed."""
    requests = recording.requests
    known = requests["e2e_us"].is_not_null()
    if requests["ttft_us"].null_count() < requests.height:
        known &= requests["ttft_us"].is_not_null()
    return ((requests["status"] == "ok") & known).to_numpy()


def on_both_sides(run: ReplayRun) -> Bools:
    """bool[n]: the requests with recorded latencies that the simulator completed, too."""
    return observed_requests(run.recording) & run.simulated.completed


def simulated_samples(run: ReplayRun, chosen: Bools) -> LatencySamples:
    """Simulated client latencies of the chosen requests, in request order."""
    return LatencySamples(run.ttft_us[chosen], run.e2e_us[chosen], run.simulated.output_tokens[chosen])


def samples_of(recording: Recording, chosen: Bools) -> LatencySamples:
    """Recorded latencies of the chosen requests, in request order; without a stream the first token is the last."""
    requests = recording.requests.frame(["ttft_us", "e2e_us", "output_tokens"]).filter(chosen)
    return LatencySamples(
        requests["ttft_us"].fill_null(requests["e2e_us"]).to_numpy().astype(np.int64),
        requests["e2e_us"].to_numpy().astype(np.int64),
        requests["output_tokens"].fill_null(0).to_numpy().astype(np.int64),
    )


def has_gaps(token_gaps: Gaps | None) -> bool:
    """Whether token times were recorded, so that the ITL is that of single tokens."""
    return token_gaps is not None and bool(token_gaps[1].sum() > 0)


def numbers_from_requests(
    recording: Recording, samples: LatencySamples, selection: Selection, token_gaps: Gaps | None
) -> Numbers:
    """Observed numbers where single requests are recorded.

    ``token_gaps``: pooled gaps between output tokens, as ``(gap_us, count)``, where token
    times were recorded; without them the ITL quantiles come from published aggregates.  The mean ITL is per token on
    both sides: an event of a stream may bring several tokens, so there may be fewer gaps than tokens.
    """
    cells = {
        "e2e": plain_numbers(statistics(samples.e2e_us)),
        "ttft": plain_numbers(statistics(samples.ttft_us)),
        "tpot": plain_numbers(statistics(samples.tpot_us)),
        "itl": dict.fromkeys(STATISTICS, Number(None, "no token times recorded")),
    }
    if len(samples.e2e_us) and recording.requests["ttft_us"].null_count() == recording.requests.height:
        return {"e2e": cells["e2e"]} | {
            metric: dict.fromkeys(STATISTICS, Number(None, "nothing was streamed"))
            for metric in ("ttft", "tpot", "itl")
        }
    if token_gaps is not None and has_gaps(token_gaps) and stream_interval(recording) > 1:
        several = f"each event brings {stream_interval(recording)} tokens (stream_interval)"
        cells["itl"] = dict.fromkeys(STATISTICS, Number(None, several))
    elif token_gaps is not None and has_gaps(token_gaps):
        cells["itl"] = plain_numbers(pooled_quantiles(*token_gaps))
    elif selection.window == (0.0, 1.0):
        cells["itl"] |= _published_itl(recording, selection.stage)
    cells["itl"]["mean"] = Number(samples.itl_mean_us)
    if any(clock.placed == REBUILT_E2E for clock in recording.clocks):
        derived = "TTFT + mean TPOT x (output tokens - 1)"
        unknown = dict.fromkeys(STATISTICS, Number(None, "only its mean is recorded"))
        for metric in ("e2e", "tpot"):
            cells[metric] = {**unknown, "mean": replace(cells[metric]["mean"], derived=derived)}
    return cells


def numbers_from_aggregates(recording: Recording, stage: int | None) -> Numbers:
    """Observed numbers where only published aggregates exist.

    The mean ITL is (mean E2E - mean TTFT) / (output tokens - 1), the configured length
    being the same for all.  TPOT of these load generators is the mean gap between stream
    events; it is corrected by the same factor as the ITL.
    """
    of_stage = recording.aggregates.filter(pl.col("stage") == (-1 if stage is None else stage))
    table = {(row["metric"], row["statistic"]): row["value"] for row in of_stage.iter_rows(named=True)}
    cells: Numbers = {
        metric: plain_numbers({name: value for (of, name), value in table.items() if of == metric}, _UNPUBLISHED)
        for metric in ("e2e", "ttft")
    }
    for metric, of in cells.items():
        for name in STATISTICS:
            low, high = (table.get((metric, f"{name} {end}")) for end in ("from", "to"))
            if low is not None and high is not None:
                of[name] = Number(None, _HISTOGRAM, (low, high))
    requests = recording.requests if stage is None else recording.requests.where("stage = $stage", stage=stage)
    lengths = requests["output_tokens"].drop_nulls()
    e2e, ttft = table.get(("e2e", "mean")), table.get(("ttft", "mean"))
    cells["itl"] = plain_numbers({}, _UNPUBLISHED) | _published_itl(recording, stage)
    if e2e is None:
        return {**cells, **_stated_gaps(table, cells, ttft, tokens_per_event(recording))}
    if ttft is not None and len(lengths):
        cells["itl"]["mean"] = Number((e2e - ttft) / (float(lengths.mean()) - 1))  # type: ignore[arg-type]
    cells["tpot"] = _published_tpot(table, cells["itl"]["mean"].value_us)
    return cells


def stream_interval(recording: Recording) -> int:
    """After how many tokens the server sends an event (``--stream-interval``); the first token is sent at once."""
    setting = recording.engine.get("stream_interval")
    return max(int(str(setting.value)), 1) if setting is not None and str(setting.value).isdecimal() else 1


def tokens_per_event(recording: Recording) -> float:
    """Output tokens that one event of a stream brings on average: those of an interval, or of accepted drafts."""
    accepted = recording.engine.get("speculative_acceptance")
    drafted = 1 + sum(map(float, str(accepted.value).split())) if accepted is not None else 1.0
    return max(float(stream_interval(recording)), drafted)


def _stated_gaps(table: Mapping[tuple[str, str], float], cells: Numbers, ttft: float | None, each: float) -> Numbers:
    """ITL and TPOT as a summary without E2E states them, and the mean E2E that follows: TTFT + TPOT (tokens - 1).

    Load generators leave E2E out by default (`vllm bench serve`).  A stated ITL is that of events of ``each`` tokens.
    """
    tpot = {name: table.get(("tpot_reported", name)) for name in STATISTICS}
    of_events = table.get(("itl_reported", "mean"))
    itl = None if of_events is None else of_events / each
    gap, named = (tpot["mean"], "TPOT") if tpot["mean"] is not None else (itl, "ITL")
    tokens = table.get(("output_tokens_reported", "mean"))
    numbers = {
        "tpot": {name: Number(value, None if value is not None else _UNPUBLISHED) for name, value in tpot.items()},
        "itl": {**cells["itl"], "mean": Number(gap, derived="TPOT") if itl is None else Number(itl)},
        "e2e": dict(cells["e2e"]),
    }
    if gap is None:
        numbers["itl"] = cells["itl"]
    elif ttft is not None and tokens is not None and tokens > 1:
        derived = f"TTFT + {named} x (output tokens - 1)"
        numbers["e2e"]["mean"] = Number(ttft + gap * (tokens - 1), derived=derived)
    return numbers


_UNPUBLISHED = "not published"
_HISTOGRAM = "only the bounds of its bucket in the server's histogram are known"


def plain_numbers(values: Mapping[str, float], absent: str = "no such request") -> dict[str, Number]:
    """The values of a metric by statistic, us, with ``absent`` as the reason for a missing one."""
    return {name: Number(values.get(name), None if name in values else absent) for name in STATISTICS}


def _published_itl(recording: Recording, stage: int | None) -> dict[str, Number]:
    """ITL quantiles from published aggregates, where there are any."""
    quantiles = published_itl(recording.aggregates, -1 if stage is None else stage)
    cells = {name: Number(quantiles[name]) for name in STATISTICS if name in quantiles}
    if "p99" not in cells and "p98" in quantiles and "p99.8" in quantiles:
        reason = "no token times recorded; published quantiles bracket it"
        cells["p99"] = Number(None, reason, (quantiles["p98"], quantiles["p99.8"]))
    return cells


def _published_tpot(table: Mapping[tuple[str, str], float], itl_mean_us: float | None) -> dict[str, Number]:
    reported = table.get(("tpot_reported", "mean"))
    factor = 0.0 if reported is None or itl_mean_us is None else itl_mean_us / reported
    values = {name: us * factor for (metric, name), us in table.items() if factor and metric == "tpot_reported"}
    return plain_numbers(values, _UNPUBLISHED)


# Metric of a finding -> the metrics that are computed from it: a gap between tokens is
# (E2E - TTFT) / (output tokens - 1) where no token times were recorded.
_SPOILS = {
    "e2e": ("e2e", "tpot", "itl"),
    "ttft": ("ttft", "tpot", "itl"),
    "itl": ("itl",),
    "output_tokens": ("tpot", "itl"),
    WAY: ("e2e", "ttft"),  # as long for the first token as for the last
    FIRST_TOKEN: ("ttft", "tpot", "itl"),
    STAMPS: ("e2e", "ttft", "tpot", "itl"),
}
_QUANTILES = tuple(name for name in STATISTICS if name != "mean")


def unusable_cells(findings: Sequence[Finding], *, token_times: bool) -> dict[tuple[str, str], Finding]:
    """``(metric, statistic)`` of each number that must not be used, with the first finding that says so.

    ``token_times``: whether the ITL comes from recorded token times, and so depends on no other latency.
    """
    unusable: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        if finding.severity != "unusable":
            continue
        for metric, statistic in _spoiled(finding.metric, token_times):
            unusable.setdefault((metric, statistic), finding)
    return unusable


def _spoiled(metric: str, token_times: bool) -> list[tuple[str, str]]:
    if metric == "itl quantiles":  # the mean does not need single gaps
        return [("itl", name) for name in _QUANTILES]
    spoiled = _SPOILS.get(metric, ())
    if token_times and metric not in ("itl", "output_tokens", FIRST_TOKEN, STAMPS):
        spoiled = tuple(name for name in spoiled if name != "itl")
    return [(name, statistic) for name in spoiled for statistic in STATISTICS]


def without_unusable(numbers: Numbers, findings: Sequence[Finding], *, token_times: bool) -> Numbers:
    """The numbers but for those that must not be used, which have the finding as their reason."""
    forbidden = unusable_cells(findings, token_times=token_times)
    return {
        metric: {
            name: number
            if (why := forbidden.get((metric, name))) is None
            else Number(None, f"unusable: {why.check}: {why.message}", unusable=why.check)
            for name, number in of_metric.items()
        }
        for metric, of_metric in numbers.items()
    }
