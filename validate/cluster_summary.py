"""The summary of a simulated cluster: all instances together, and each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from blis_replay.replay.cluster_simulation import ClusterSimulation
from blis_replay.validate.metrics import LatencySamples
from blis_replay.validate.simulation_summary import hundredths, latencies_ms, summary, summary_frame
from blis_replay.validate.terminal import percent_plain, table, wrap

# The same for all instances.
_ONCE = ("provenance", "ignored_columns")
_SUMS = ("requests", "completed", "steps", "preemptions")


def cluster_summary(simulation: ClusterSimulation) -> dict[str, Any]:
    """Plain JSON values: those of ``simulation_summary.summary`` for all together, and in ``instances[]`` for each."""
    result, trace = simulation.result, simulation.table.trace
    instances = [summary(part) for part in simulation.instances]
    done = result.completed
    samples = LatencySamples(result.ttft_us[done], result.e2e_us[done], trace.output_tokens[done])
    gaps_us, counts = zip(
        *(part.result.inter_token_gaps(part.result.completed) for part in simulation.instances), strict=True
    )
    duration_s = float((trace.arrival_us + result.e2e_us)[done].max(initial=0) - trace.arrival_us[0]) / 1e6
    prompts = [int(part.table.trace.prompt_tokens.sum()) for part in simulation.instances]
    hits = sum((one["prefix_hit_rate"] or 0) * tokens for one, tokens in zip(instances, prompts, strict=True))
    return {
        **{name: sum(one[name] for one in instances) for name in _SUMS},
        "duration_s": duration_s,
        "requests_per_s": int(done.sum()) / duration_s if duration_s else None,
        "output_tokens_per_s": int(samples.output_tokens.sum()) / duration_s if duration_s else None,
        "latencies_ms": latencies_ms(samples, (np.concatenate(gaps_us), np.concatenate(counts))),
        "prefix_hit_rate": hits / sum(prompts),
        "instances": [{name: one[name] for name in one if name not in _ONCE} for one in instances],
        "ignored_columns": instances[0]["ignored_columns"],
        "provenance": instances[0]["provenance"] | {"router": type(simulation.cluster.router).__name__},
    }


def cluster_summary_text(values: dict[str, Any]) -> str:
    """The page of a summary, in 80 columns."""
    source, instances = values["provenance"], values["instances"]
    rates = [hundredths(values[name]) for name in ("requests_per_s", "output_tokens_per_s")]
    rows = [["all", *_row(values)], *([str(i), *_row(one)] for i, one in enumerate(instances))]
    header = ["instance", "requests", "TTFT mean", "TTFT p99", "E2E mean", "E2E p99", "preempted", "hits"]
    lines = [
        f"{values['completed']:,} of {values['requests']:,} requests completed in {values['duration_s']:,.1f} s; "
        f"{rates[0]} requests/s, {rates[1]} output tokens/s",
        "latencies in ms; hits: share of the prompt tokens found in the prefix cache",
    ]
    if values["ignored_columns"]:
        lines.append(f"columns not used: {', '.join(values['ignored_columns'])}")
    head = (
        f"coefficients: {source['coefficients']}, {source['model']} tp {source['tensor_parallelism']}; "
        f"{len(instances)} instances, router {source['router']}"
    )
    return "\n\n".join([wrap(head), table(header, rows), "\n".join(map(wrap, lines))])


def cluster_frame(values: dict[str, Any]) -> pl.DataFrame:
    """``instance, quantity, value``: the numbers of all together (``all``), then of each instance."""
    parts = [("all", values), *((str(i), one) for i, one in enumerate(values["instances"]))]
    return pl.concat([summary_frame(one).select(pl.lit(name).alias("instance"), "*") for name, one in parts])


def _row(values: dict[str, Any]) -> list[str]:
    latencies = values["latencies_ms"]
    cells = [hundredths(latencies[metric][statistic]) for metric in ("ttft", "e2e") for statistic in ("mean", "p99")]
    return [f"{values['requests']:,}", *cells, f"{values['preemptions']:,}", percent_plain(values["prefix_hit_rate"])]
