"""Which pictures an experiment has, and in one line each why it lacks the others."""

from __future__ import annotations

from dataclasses import dataclass

from blis_replay.replay.prefix import prompt_tokens
from blis_replay.validate.comparison.compare import simulated_samples
from blis_replay.validate.observed import samples_of
from blis_replay.validate.report.bands import band, band_by, depth_edges, waiting_at_arrival
from blis_replay.validate.report.engine_charts import depth_chart, step_chart
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.latency_charts import distribution_chart, errors_chart, ttft_chart
from blis_replay.validate.report.over_time import depth_over_time, errors_over_time, stage_starts
from blis_replay.validate.report.quantile_curves import QuantileCurve, published_curve, quantile_curve
from blis_replay.validate.report.step_cycles import step_cycles
from blis_replay.validate.report.svg import Chart
from blis_replay.validate.report.waterfall_chart import waterfall_chart

_NO_REQUESTS = "no latencies of single requests were recorded"


@dataclass(frozen=True)
class Charts:
    """``shown`` in the order of the page; ``absent``: what is not drawn, to the reason."""

    shown: tuple[Chart, ...]
    absent: dict[str, str]


def charts_of(evidence: Evidence) -> Charts:
    """All pictures that the recording and the replay have numbers for."""
    shown: list[Chart] = []
    absent: dict[str, str] = {}
    for part in (_distributions, _ttft, _steps, _over_time, _depth, _waterfall):
        charts, reasons = part(evidence)
        shown += charts
        absent |= reasons
    return Charts(tuple(shown), absent)


_Part = tuple[list[Chart], dict[str, str]]


def _distributions(evidence: Evidence) -> _Part:
    shown, absent = [], {}
    for metric in ("e2e", "ttft", "itl"):
        observed = None if metric in _forbidden(evidence) else _observed_curve(evidence, metric)
        shown.append(distribution_chart(metric, observed, _simulated_curve(evidence, metric)))
        if observed is None:
            cell = evidence.comparison.metrics[metric]["p50"]
            absent[f"observed distribution of {metric.upper()}"] = cell.reason or "nothing was recorded of it"
    return shown, absent


def _observed_curve(evidence: Evidence, metric: str) -> QuantileCurve | None:
    recording = evidence.run.recording
    if metric == "itl" and evidence.token_gaps is not None:
        return quantile_curve(*evidence.token_gaps)
    if metric == "itl" or not evidence.compared.any():
        return published_curve(recording, metric)
    samples = samples_of(recording, evidence.compared)
    return quantile_curve(samples.e2e_us if metric == "e2e" else samples.ttft_us)


def _simulated_curve(evidence: Evidence, metric: str) -> QuantileCurve | None:
    run = evidence.run
    chosen = evidence.compared
    if not chosen.any():
        chosen = run.simulated.completed & (run.recording.requests["status"] == "ok").to_numpy()
    if metric == "itl":
        gaps = run.token_gaps()
        return quantile_curve(gaps.gap_us, gaps.counts(chosen))
    samples = simulated_samples(run, chosen)
    return quantile_curve(samples.e2e_us if metric == "e2e" else samples.ttft_us)


def _over_time(evidence: Evidence) -> _Part:
    run, title = evidence.run, "error over the time of the run"
    metrics = [metric for metric in ("e2e", "ttft", "itl") if metric not in _forbidden(evidence)]
    if not evidence.compared.any():
        return [], {title: _NO_REQUESTS}
    if not metrics:
        return [], {title: "instrument checks call all of E2E, TTFT and ITL unusable"}
    errors = errors_over_time(
        run.recording.requests["arrival_us"].to_numpy()[evidence.compared],
        samples_of(run.recording, evidence.compared),
        simulated_samples(run, evidence.compared),
    )
    return [errors_chart(errors, stage_starts(run.recording), metrics)], {}


def _ttft(evidence: Evidence) -> _Part:
    run, compared, title = evidence.run, evidence.compared, "TTFT against prompt tokens and queue depth"
    if not compared.any():
        return [], {title: _NO_REQUESTS}
    if "ttft" in _forbidden(evidence):
        return [], {title: evidence.comparison.unusable["ttft"]}
    ttft_us = run.recording.requests["ttft_us"].to_numpy()[compared], run.ttft_us[compared]
    arrival_us = run.recording.requests["arrival_us"].to_numpy()[compared], run.plan.trace.arrival_us[compared]
    prompts = prompt_tokens(run.recording)[compared], run.plan.trace.prompt_tokens[compared]
    by_prompt = [band(tokens, side) for tokens, side in zip(prompts, ttft_us, strict=True)]
    depths = [waiting_at_arrival(sent, sent + side) for sent, side in zip(arrival_us, ttft_us, strict=True)]
    edges = depth_edges(max(int(depth.max()) for depth in depths))
    by_depth = [band_by(edges, depth, side) for depth, side in zip(depths, ttft_us, strict=True)]
    return [
        ttft_chart("TTFT against prompt tokens", "prompt tokens", *by_prompt),
        ttft_chart("TTFT against queue depth", "requests without a first token at the send", *by_depth),
    ], {}


def _steps(evidence: Evidence) -> _Part:
    cycles = step_cycles(evidence.run)
    if cycles is None:
        return [], {"step cycle against batch size": "fewer than 20 pairs of consecutive steps were recorded"}
    return [step_chart(cycles)], {}


def _depth(evidence: Evidence) -> _Part:
    depth = depth_over_time(evidence.run, evidence.compared)
    if depth is None:
        return [], {"running and waiting depth": f"no steps on the requests' clock, and {_NO_REQUESTS}"}
    return [depth_chart(depth, stage_starts(evidence.run.recording))], {}


def _waterfall(evidence: Evidence) -> _Part:
    title = "where the error comes from"
    if evidence.attribution is None:
        return [], {title: evidence.not_attributed}
    chart = waterfall_chart(evidence.attribution)
    return ([chart], {}) if chart is not None else ([], {title: "no mean was observed"})


def _forbidden(evidence: Evidence) -> set[str]:
    """Metrics that an instrument check calls unusable."""
    return {metric for metric, cells in evidence.comparison.metrics.items() if cells["mean"].unusable}
