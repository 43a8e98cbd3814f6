"""The summary of a simulation: counts, rates, latencies, and how full the engine was."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.replay.simulation import Simulation
from blis_replay.validate.metrics import METRICS, STATISTICS, LatencySamples, Values, latency_statistics
from blis_replay.validate.terminal import percent_plain, table, wrap


def summary(simulation: Simulation) -> dict[str, Any]:
    """Plain JSON values; times in ms, rates per s, shares as fractions.

    ``duration_s``: first arrival to last token at a client.  ``prefix_hit_rate``: prompt tokens
    that were not computed at the first admission, known beforehand or found in the simulated
    cache, over all; null without a request.  ``min_free_blocks`` is null where memory has no bound.
    """
    result, trace, engine = simulation.result, simulation.table.trace, simulation.engine
    done, steps = result.completed, result.steps
    first_us = int(trace.arrival_us[0]) if len(trace) else 0
    duration_s = float((trace.arrival_us + result.e2e_us)[done].max(initial=first_us) - first_us) / 1e6
    hits = np.maximum(result.cached_tokens, trace.prompt_tokens - trace.prefill_tokens)
    samples = LatencySamples(result.ttft_us[done], result.e2e_us[done], result.output_tokens[done])
    bounded = engine.num_gpu_blocks is not None
    return {
        "requests": len(trace),
        "completed": int(done.sum()),
        "steps": len(steps),
        "duration_s": duration_s,
        "requests_per_s": int(done.sum()) / duration_s if duration_s else None,
        "output_tokens_per_s": int(result.output_tokens[done].sum()) / duration_s if duration_s else None,
        "latencies_ms": latencies_ms(samples, result.inter_token_gaps(done)),
        "preemptions": int(result.preemptions.sum()),
        "prefix_hit_rate": int(hits.sum()) / int(trace.prompt_tokens.sum()) if len(trace) else None,
        "peak_running": int(steps["running_depth"].max(initial=0)),
        "peak_waiting": int(steps["waiting_depth"].max(initial=0)),
        "min_free_blocks": int(steps["free_blocks"].min()) if bounded and len(steps) else None,
        "ignored_columns": list(simulation.table.ignored),
        "provenance": {
            "coefficients": simulation.release.name,
            "coefficients_hash": simulation.release.sha256,
            "model": simulation.entry.model,
            "tensor_parallelism": simulation.entry.tensor_parallelism,
            "engine": vars(engine),
        },
    }


def summary_text(values: dict[str, Any]) -> str:
    """The page of a summary, in 80 columns."""
    latencies, free, source = values["latencies_ms"], values["min_free_blocks"], values["provenance"]
    rows = [[metric.upper(), *(hundredths(latencies[metric][s]) for s in STATISTICS)] for metric in METRICS]
    lines = [
        f"{values['completed']:,} of {values['requests']:,} requests completed in {values['duration_s']:,.1f} s "
        f"and {values['steps']:,} steps",
        f"throughput {hundredths(values['requests_per_s'])} requests/s, "
        f"{hundredths(values['output_tokens_per_s'])} output tokens/s",
        f"preemptions {values['preemptions']:,}; prefix hit rate {percent_plain(values['prefix_hit_rate'])}",
        f"peak running {values['peak_running']:,}, peak waiting {values['peak_waiting']:,}, "
        + ("KV blocks without bound" if free is None else f"least free KV blocks {free:,}"),
    ]
    if values["ignored_columns"]:
        lines.append(f"columns not used: {', '.join(values['ignored_columns'])}")
    head = f"coefficients: {source['coefficients']}, {source['model']} tp {source['tensor_parallelism']}"
    return "\n\n".join([wrap(head), table(["ms", *STATISTICS], rows), "\n".join(map(wrap, lines))])


def summary_frame(values: dict[str, Any]) -> pl.DataFrame:
    """``quantity, value``: the numbers of a summary, latencies as ``e2e_p99_ms``; null where there is none."""
    rows = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    rows |= {f"{m}_{s}_ms": values["latencies_ms"][m][s] for m in METRICS for s in STATISTICS}
    return pl.DataFrame(list(rows.items()), orient="row", schema={"quantity": pl.String, "value": pl.Float64})


def latencies_ms(samples: LatencySamples, gaps: tuple[Values, NDArray[np.int64]]) -> dict[str, dict[str, float | None]]:
    """Statistics of all metrics, ms, by metric and statistic; None where there are no samples."""
    latencies = latency_statistics(samples, gaps)
    return {
        metric: {
            name: round(us / 1000, 6) if (us := latencies[metric].get(name)) is not None else None
            for name in STATISTICS
        }
        for metric in METRICS
    }


def hundredths(value: float | None) -> str:
    """Two decimals, ``-`` where there is nothing."""
    return "-" if value is None else f"{value:,.2f}"
