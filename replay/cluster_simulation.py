"""Simulating requests on several instances: the whole, and each instance as a simulation of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.blis.cluster.config import ClusterConfig
from blis_replay.blis.cluster.simulate import ClusterResult, simulate_cluster
from blis_replay.blis.release import CoefficientRelease, ModelEntry
from blis_replay.blis.trace import EngineConfig
from blis_replay.replay.request_table import RequestTable
from blis_replay.replay.simulation import Simulation, refuse_unservable, request_frame, step_frame, write_frame


@dataclass(frozen=True)
class ClusterSimulation:
    """A finished simulation of a cluster; ``result`` is in the order of ``table.trace``.

    ``instances``: what each instance served, as a simulation of those requests alone.
    """

    table: RequestTable
    cluster: ClusterConfig
    result: ClusterResult
    instances: tuple[Simulation, ...]


def simulate_on_cluster(
    table: RequestTable, cluster: ClusterConfig, engine: EngineConfig, release: CoefficientRelease, entry: ModelEntry
) -> ClusterSimulation:
    """Simulate requests on a cluster of engines; raises as ``simulate_table`` and ``simulate_cluster`` do."""
    refuse_unservable(table, engine)
    result = simulate_cluster(table.trace, cluster, engine, entry.latency, entry.lifecycle)
    instances = tuple(
        Simulation(_part(table, np.flatnonzero(result.instance == i)), engine, release, entry, run)
        for i, run in enumerate(result.instances)
    )
    return ClusterSimulation(table, cluster, result, instances)


def write_cluster_tables(simulation: ClusterSimulation, folder: Path, as_csv: bool) -> None:
    """Write ``requests`` and ``steps`` of all instances into a folder, ``instance`` the first column.

    Raises ``OSError`` if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame_of in (("requests", request_frame), ("steps", step_frame)):
        frames = [
            frame_of(part).select(pl.lit(i).alias("instance"), "*") for i, part in enumerate(simulation.instances)
        ]
        write_frame(folder / name, iter([pl.concat(frames)]), as_csv)


def _part(table: RequestTable, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> RequestTable:
    """Some requests of a table, by their place in its trace, with the names that they have in the file."""
    rows = table.rows[chosen]
    names = table.request_ids or [str(row) for row in range(len(table.rows))]
    mask = np.zeros(len(table.rows), np.bool_)
    mask[chosen] = True
    return replace(
        table,
        trace=table.trace.part(mask),
        rows=np.argsort(np.argsort(rows)),
        request_ids=[names[row] for row in np.sort(rows)],
        numbers=table.numbers[np.sort(rows)],
    )
