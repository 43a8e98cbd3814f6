"""Two synthetic servers whose coefficients are known, and releases made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn, ModelEntry, format_release, parse_release
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.files import write_experiment
from blis_replay_labs.planted.generate import generate

SMALL = SyntheticExperiment(slug="20260301-120000-synthetic-1b-tp1-general", requests=200)
LARGE = SyntheticExperiment(
    slug="20260301-130000-synthetic-2b-tp1-general",
    model="synthetic/synthetic-2b",
    latency=LatencyModel("blackbox", 16_000_000, 60_000, 90_000),
    requests=200,
    seed=2,
)
# Both client timings, and the prompts that tell the prefix cache's hits.
FILES = (
    "exp-config.yaml",
    "results/config.yaml",
    "results/per_request_lifecycle_metrics.json",
    "trace.yaml",
    "trace.csv.gz",
)


@cache
def truth_of(spec: SyntheticExperiment) -> SyntheticTruth:
    return generate(spec)


def written(spec: SyntheticExperiment, directory: Path, **config: str) -> Path:
    """The experiment in a folder of its own; ``config``: further lines of its exp-config.yaml."""
    folder = directory / spec.slug
    write_experiment(truth_of(spec), folder, files=FILES)
    with (folder / "exp-config.yaml").open("a") as file:
        file.writelines(f"{name}: {value}\n" for name, value in config.items())
    (directory / "engine.yaml").write_text("async_scheduling: true\nnum_gpu_blocks: 10001\n")
    return folder


def corrupted(folder: Path, *, crossed: bool) -> Path:
    """The timings of every tenth request spoilt, as its load generator would write them.

    ``crossed``: send and end change places; else they end on another clock, 1e9 s on.
    """
    for name in ("trace.yaml", "trace.csv.gz"):
        (folder / name).unlink()
    path = folder / "results" / "per_request_lifecycle_metrics.json"
    requests = json.loads(path.read_text("utf-8"))
    for request in requests[::10]:
        if crossed:
            request["start_time"], request["end_time"] = request["end_time"], request["start_time"]
        else:
            request["end_time"] += 1e9
            request["info"]["output_token_times"] = [t + 1e9 for t in request["info"]["output_token_times"]]
    path.write_text(json.dumps(requests), "utf-8")
    return folder


def release(
    name: str,
    *,
    slower: str = "",
    by: float = 1.0,
    hardware: str = "H100-SXM-80GB",
    dtype: str | None = None,
    fitted_on: Sequence[FittedOn] | None = (),
) -> CoefficientRelease:
    """The true coefficients of both servers; those of model ``slower`` have every step ``by`` times as long."""
    entries = []
    for spec in (SMALL, LARGE):
        factor = by if spec.model == slower else 1.0
        ns = {
            field: round(getattr(spec.latency, field) * factor)
            for field in ("intercept_ns", "per_prefill_token_ns", "per_decode_token_ns")
        }
        entries.append(ModelEntry(spec.model, 1, replace(spec.latency, **ns), spec.lifecycle, dtype=dtype))
    stated = None if fitted_on is None else tuple(fitted_on)
    made = CoefficientRelease(name, "valid", "Made.", "a test", hardware, models=tuple(entries), fitted_on=stated)
    return parse_release(format_release(made), name)
