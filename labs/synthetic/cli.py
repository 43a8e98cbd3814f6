"""What ``blis-replay simulate --engine`` answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from blis_replay.base.errors import TraceError
from blis_replay.base.files import write_whole
from blis_replay.blis.closed_loop import sessions_of
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import EngineOverrides, ReplayMode
from blis_replay.validate.metrics.objectives import Objectives
from blis_replay.validate.text.answer import Answer, page_json
from blis_replay.validate.what_if import mode_with
from blis_replay_labs.cluster.config import ClusterConfig, RoundRobin, Router, router_of_text
from blis_replay_labs.synthetic.request_table import RequestTable, read_request_table
from blis_replay_labs.synthetic.simulation import (
    EngineFile,
    read_engine,
    recorded_table,
    simulate_on_cluster,
    simulate_table,
    write_tables,
)
from blis_replay_labs.synthetic.text import cluster_answer, cluster_summary, simulation_answer, summary

# Files in the folder of a simulation: those of an earlier one are replaced only with --force.
_WRITTEN = ("requests.parquet", "steps.parquet", "summary.json")


def simulate_requests(
    requests: Path | Recording,
    engine: Path,
    release: CoefficientRelease,
    model: str | None,
    settings: EngineOverrides,
    *,
    instances: int | None,
    router_text: str | None,
    objectives: Objectives,
    out: Path,
    force: bool,
) -> Answer:
    """Simulate a request table or a recording on the engine of a file, and write its tables.

    ``settings``: overrides of the file's engine arguments and of the load, like ``--set``.  ``out``: gets
    requests.parquet, steps.parquet and summary.json.  Several ``instances`` stand behind a router.
    """
    mode = mode_with(settings)
    if router_text is not None and instances is None:
        raise click.UsageError("--router chooses between instances; say how many with --instances")
    if instances is not None and (mode.loop is not None or objectives):
        raise click.UsageError("--slo and a closed loop are of one engine; leave --instances out")
    if not force and (there := sorted(name for name in _WRITTEN if (out / name).exists())):
        verb = "is" if len(there) == 1 else "are"
        raise click.UsageError(
            f"--out {out}: {' and '.join(there)} {verb} there already; choose another folder, or --force"
        )
    router = _router(router_text)
    given = read_engine(engine, dict(mode.engine))
    entry = given.entry(release, model)
    table = _table(requests, given, mode)
    if instances is not None:
        pooled = simulate_on_cluster(table, ClusterConfig(instances, router), given.engine, release, entry)
        write_tables(pooled.instances, out, numbered=True)
        answer = cluster_answer(cluster_summary(pooled))
    else:
        simulation = simulate_table(table, given.engine, release, entry, mode.loop)
        write_tables([simulation], out)
        answer = simulation_answer(summary(simulation, objectives))
    write_whole(out / "summary.json", page_json(answer.document) + "\n")
    return answer


def _router(text: str | None) -> Router:
    try:
        return router_of_text(text) if text else RoundRobin()
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--router") from error


def _table(requests: Path | Recording, given: EngineFile, mode: ReplayMode) -> RequestTable:
    """The requests, with the load of a mode: faster arrivals, or clients and the turns of their sessions."""
    if isinstance(requests, Recording):
        table = recorded_table(requests, given.engine)
    else:
        table = read_request_table(requests, given.engine.block_size, arrivals=mode.loop is None)
    if mode.rate != 1:
        arrival_us = np.rint(table.trace.arrival_us / mode.rate).astype(np.int64)
        table = replace(table, trace=replace(table.trace, arrival_us=arrival_us))
    if mode.loop is None:
        return table.of_open_load()
    if mode.sessions == "prompts":
        return replace(table, sessions=sessions_of(table.trace, str(table.path))[0])
    return table
