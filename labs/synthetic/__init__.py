"""Request tables and load profiles through the simulator, and a search for load limits.

Plugs in ``blis-replay simulate --engine`` and ``simulate --find``.  From Python: ``simulate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blis_replay.validate.text.answer import Answer

__all__ = ["simulate"]


def simulate(requests: Path | str, engine: Path | str, coefficients: str, model: str | None = None) -> Answer:
    """Simulate a request table (CSV, JSON lines or Parquet) on an engine (YAML); a row per number of the summary.

    ``model`` and tensor_parallel_size of the engine choose between the models of a release.

    Example: ``simulate("requests.csv", "engine.yaml", "h100-vllm-0.15.1", "llama-2-7b-hf").frame``
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay_labs.synthetic.request_table import read_request_table
    from blis_replay_labs.synthetic.simulation import read_engine, simulate_table
    from blis_replay_labs.synthetic.text import simulation_answer, summary

    release, given = load_release(coefficients), read_engine(Path(engine))
    entry = given.entry(release, model)
    table = read_request_table(Path(requests), given.engine.block_size)
    return simulation_answer(summary(simulate_table(table, given.engine, release, entry)))
