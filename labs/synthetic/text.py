"""The summary of a simulation: counts, rates, latencies, and how full the engine was."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, columns_named
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples, latency_statistics
from blis_replay.validate.metrics.objectives import Objectives, attained
from blis_replay.validate.text.answer import Answer, Block
from blis_replay.validate.text.cells import number_text, percent_plain
from blis_replay.validate.text.messages import attainment_line
from blis_replay.validate.what_if import cut_short_text
from blis_replay_labs.synthetic.simulation import ClusterSimulation, Simulation


def summary(simulation: Simulation, objectives: Objectives = ()) -> dict[str, Any]:
    """Plain JSON values; times in ms, rates per s, shares as fractions.

    ``duration_s``: first arrival to last token at a client.  ``prefix_hit_rate``: prompt tokens
    that were not computed at the first admission, known beforehand or found in the simulated
    cache, over all; null without a request.  ``cut_short``: requests whose output ended at ``max_model_len``.
    ``min_free_blocks`` is null where memory has no bound.
    ``slo``: what came of the objectives, where there are any.
    """
    result, trace, engine = simulation.result, simulation.table.trace, simulation.engine
    done, steps = result.completed, result.steps
    first_us = int(result.arrival_us[0]) if len(trace) else 0
    duration_s = float((result.arrival_us + result.e2e_us)[done].max(initial=first_us) - first_us) / 1e6
    hits = np.maximum(result.cached_tokens, trace.prompt_tokens - trace.prefill_tokens)
    samples = LatencySamples(result.ttft_us[done], result.e2e_us[done], result.output_tokens[done])
    bounded, gaps = engine.num_gpu_blocks is not None, result.inter_token_gaps(done)
    latencies = latency_statistics(samples, gaps)
    slo = {"slo": attained(objectives, samples, gaps, len(trace)).document} if objectives else {}
    return {
        "requests": len(trace),
        "completed": int(done.sum()),
        "cut_short": int((result.output_tokens < trace.output_tokens)[done].sum()),
        "steps": len(steps),
        "duration_s": duration_s,
        "requests_per_s": len(samples.e2e_us) / duration_s if duration_s else None,
        "output_tokens_per_s": int(samples.output_tokens.sum()) / duration_s if duration_s else None,
        "latencies_ms": {
            metric: {
                name: round(us / 1000, 6) if (us := latencies[metric].get(name)) is not None else None
                for name in STATISTICS
            }
            for metric in METRICS
        },
        **slo,
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
            "engine": asdict(engine) | {"kv_cache_groups": [asdict(group) for group in engine.kv_cache_groups]},
        },
    }


def simulation_answer(values: dict[str, Any]) -> Answer:
    """A ``summary``, latencies in ms; the rows are ``quantity, value``, latencies as ``e2e_p99_ms``."""
    latencies, free, source = values["latencies_ms"], values["min_free_blocks"], values["provenance"]
    columns = (Column("ms"), *columns_named(*STATISTICS, kind="decimal"))
    rows = [[metric.upper(), *(latencies[metric][s] for s in STATISTICS)] for metric in METRICS]
    lines = [
        f"{values['completed']:,} of {values['requests']:,} requests completed in {values['duration_s']:,.1f} s "
        f"and {counted(values['steps'], 'step')}",
        *_cut_short(values),
        f"throughput {number_text(values['requests_per_s'], 'decimal')} requests/s, "
        f"{number_text(values['output_tokens_per_s'], 'decimal')} output tokens/s",
        f"preemptions {values['preemptions']:,}; prefix hit rate {percent_plain(values['prefix_hit_rate'])}",
        f"peak running {values['peak_running']:,}, peak waiting {values['peak_waiting']:,}, "
        + ("KV blocks unlimited" if free is None else f"least free KV blocks {free:,}"),
        *([attainment_line(values["slo"])] if "slo" in values else []),
        *_ignored(values),
    ]
    head = f"coefficients: {source['coefficients']}, {source['model']} tp {source['tensor_parallelism']}"
    data = Table("", _DATA_COLUMNS[1:], [list(row) for row in _quantities(values)])
    return Answer([head, Table("", columns, rows), Block(lines)], values, data)


_DATA_COLUMNS = (Column("instance", "data"), Column("quantity", "data"), Column("value", "real"))


def _quantities(values: dict[str, Any]) -> list[tuple[str, float | None]]:
    numbers = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    return list((numbers | {f"{m}_{s}_ms": values["latencies_ms"][m][s] for m in METRICS for s in STATISTICS}).items())


def _cut_short(values: dict[str, Any]) -> list[str]:
    return [cut_short_text(values["cut_short"])] if values["cut_short"] else []


def _ignored(values: dict[str, Any]) -> list[str]:
    ignored = values["ignored_columns"]
    return [f"columns not used: {', '.join(ignored)}"] if ignored else []


# Fields that are the same for all instances.
_ONCE = ("provenance", "ignored_columns")
_OF_ALL = (
    *("requests", "completed", "cut_short", "steps", "preemptions", "duration_s", "requests_per_s"),
    *("output_tokens_per_s", "latencies_ms", "prefix_hit_rate"),
)


def cluster_summary(simulation: ClusterSimulation) -> dict[str, Any]:
    """Plain JSON values: those of ``summary`` for all together, and in ``instances[]`` for each."""
    whole, instances = summary(simulation.whole), [summary(part) for part in simulation.instances]
    return {
        **{name: whole[name] for name in _OF_ALL},
        "instances": [{name: one[name] for name in one if name not in _ONCE} for one in instances],
        "ignored_columns": whole["ignored_columns"],
        "provenance": whole["provenance"] | {"router": _router_name(simulation.cluster.router)},
    }


def _router_name(router: object) -> str:
    """As ``--router`` takes it: ``RoundRobin`` is round-robin."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(router).__name__).lower()


_INSTANCE_COLUMNS = (
    *(Column("instance"), Column("requests", "count")),
    *columns_named("TTFT mean", "TTFT p99", "E2E mean", "E2E p99", kind="decimal"),
    *(Column("preempted", "count"), Column("hits", "share")),
)


def cluster_answer(values: dict[str, Any]) -> Answer:
    """A ``cluster_summary``: all instances together and each; the rows are ``instance, quantity, value``."""
    source = values["provenance"]
    parts = {"all": values} | {str(i): one for i, one in enumerate(values["instances"])}
    rates = [number_text(values[name], "decimal") for name in ("requests_per_s", "output_tokens_per_s")]
    lines = [
        f"{values['completed']:,} of {values['requests']:,} requests completed in {values['duration_s']:,.1f} s; "
        f"{rates[0]} requests/s, {rates[1]} output tokens/s",
        *_cut_short(values),
        "latencies in ms; hits: share of the prompt tokens found in the prefix cache",
        *_ignored(values),
    ]
    head = (
        f"coefficients: {source['coefficients']}, {source['model']} tp {source['tensor_parallelism']}; "
        f"{len(values['instances'])} instances, router {source['router']}"
    )
    instances = Table("", _INSTANCE_COLUMNS, [[name, *_instance(one)] for name, one in parts.items()])
    rows = [[name, *row] for name, one in parts.items() for row in _quantities(one)]
    return Answer([head, instances, Block(lines)], values, Table("", _DATA_COLUMNS, rows))


def _instance(values: dict[str, Any]) -> list[Cell]:
    latencies = [
        values["latencies_ms"][metric][statistic] for metric in ("ttft", "e2e") for statistic in ("mean", "p99")
    ]
    return [values["requests"], *latencies, values["preemptions"], values["prefix_hit_rate"]]
