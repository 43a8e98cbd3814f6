"""Files of a synthetic experiment, as a load generator and vLLM leave them.

::

    truth = generate(SyntheticExperiment(seed=3))
    write_experiment(truth, directory)

A replay of what was written finds the coefficients, the delays and every time of ``truth``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from blis_replay_labs.planted import writers_inference_perf as inference_perf
from blis_replay_labs.planted import writers_tracev2 as tracev2
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.generate import generate
from blis_replay_labs.planted.writers_log import server_log
from blis_replay_labs.planted.writers_otlp import traces

Writer = Callable[[SyntheticTruth], bytes]

_WRITERS: dict[str, Writer] = {
    "exp-config.yaml": inference_perf.exp_config,
    "profile.yaml": inference_perf.profile,
    "results/config.yaml": inference_perf.load_config,
    "results/summary_lifecycle_metrics.json": inference_perf.summary_report,
    "results/per_request_lifecycle_metrics.json": inference_perf.per_request,
    "trace.yaml": tracev2.trace_header,
    "trace.csv.gz": tracev2.trace_data,
    "traces.json.gz": traces,
}
# One file per load stage that had requests.
STAGE_REPORTS = "results/stage_N_lifecycle_metrics.json"
# Every file of an experiment but the server's log, vllm.log.
ALL: tuple[str, ...] = (*_WRITERS, STAGE_REPORTS)
SERVER_LOG = "vllm.log"


def write_experiment(
    truth: SyntheticTruth, directory: Path, *, files: Collection[str] = ALL, forms: Mapping[str, Writer] | None = None
) -> None:
    """Write these files of the experiment: names out of ``ALL``, ``vllm.log``, and ``forms``, which has more writers.

    Raises ``ValueError`` for any other name.
    """
    writers = {**_WRITERS, SERVER_LOG: server_log, **(forms or {})}
    if unknown := set(files) - {*writers, STAGE_REPORTS}:
        known = ", ".join((*writers, STAGE_REPORTS))
        raise ValueError(f"no such file of an experiment: {sorted(unknown)}; the files are {known}")
    contents = {name: writer(truth) for name, writer in writers.items() if name in files}
    if STAGE_REPORTS in files:
        for stage in (stage for stage in truth.spec.stages if stage.stage in truth.stage):
            contents[STAGE_REPORTS.replace("_N_", f"_{stage.stage}_")] = inference_perf.stage_report(truth, stage)
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_demo(directory: Path) -> SyntheticTruth:
    """Write a complete experiment of 300 requests into ``directory / slug`` and return its truth."""
    truth = generate(SyntheticExperiment())
    write_experiment(truth, directory / truth.spec.slug)
    return truth
