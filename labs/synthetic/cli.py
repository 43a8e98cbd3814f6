"""The verb ``blis-replay simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    FILE,
    FOLDER,
    another_gpu_options,
    name_option,
    release_on_gpu,
    release_option,
    slo_option,
    store_option,
    verb,
)

if TYPE_CHECKING:
    from blis_replay.validate.metrics.objectives import Objectives

# Output files: those of an earlier simulation are replaced only with --force.
_WRITTEN = ("requests.parquet", "steps.parquet", "summary.json", "requests.csv", "steps.csv")

# As in labs/cluster/config.py, whose import would make help slow; a test compares the two.
ROUTERS = ("round-robin", "least-loaded", "random", "always-busiest", "weighted")


def _complete_routers(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in ROUTERS if name.startswith(incomplete)]


@verb("simulate")
@click.option("--requests", "requests_path", type=FILE, help="Request table: .csv, .jsonl or .parquet.")
@name_option("name", "Or the requests of a recording: slug or alias.")
@click.option(
    "--workload", "workload_path", type=FILE, help="Or synthetic requests: a YAML file (labs/synthetic/README.md)."
)
@click.option(
    "--engine", "engine_path", type=FILE, required=True, help="YAML with engine arguments under vLLM's names."
)
@release_option("--coefficients", required=True, help_text="A release that ships, or a YAML file.")
@click.option("--model", metavar="NAME", help="Which model of the release, where it has several.")
@click.option(
    "--tensor-parallelism",
    type=click.IntRange(1),
    help="Tensor parallelism, if the release has several for this model.",
)
@another_gpu_options
@click.option("--out", "-o", type=FOLDER, required=True, help="Folder for the tables and summary.")
@click.option("--instances", type=click.IntRange(1, 1000), default=1, show_default=True, help="Engines of a cluster.")
@click.option(
    "--router",
    "router_text",
    metavar="NAME",
    shell_complete=_complete_routers,
    help="Who gets a request: round-robin, least-loaded, random, always-busiest, or weighted, with weights as in "
    "weighted:prefix_affinity=3,queue_depth=2.  [default: round-robin]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1_000_000),
    help="Number of clients, each of which sends its next request when the one before is answered; arrivals of the "
    "table are not used.",
)
@click.option(
    "--think-time",
    "think_ms",
    type=click.FloatRange(0, 1e9),
    metavar="MS",
    help="Delay between a response and that client's next request.",
)
@click.option(
    "--ramp",
    "ramp_s",
    type=click.FloatRange(0, 1e6),
    metavar="SECONDS",
    help="The first requests of these clients are sent evenly over this time.",
)
@slo_option
@click.option("--force", is_flag=True, help="Replace the tables that are there.")
@click.option("--csv-tables", is_flag=True, help="Write the tables as CSV too.")
@store_option
@form_options
def simulate_verb(
    requests_path: Path | None,
    name: str | None,
    workload_path: Path | None,
    engine_path: Path,
    coefficients: str,
    model: str | None,
    tensor_parallelism: int | None,
    gpu: str | None,
    gpu_file: Path | None,
    out: Path,
    instances: int,
    router_text: str | None,
    concurrency: int | None,
    think_ms: float | None,
    ramp_s: float | None,
    objectives: Objectives,
    force: bool,
    csv_tables: bool,
    store_path: Path,
) -> None:
    """Simulate any request table, or the requests of a recording on another engine.

    The table has an arrival (arrival_us, arrival_ms or arrival_s), prompt_tokens and
    output_tokens; optional request_id, priority (lower is served first), cached_tokens,
    session, and block_keys or hash_ids: an integer for each full block of a request, equal
    where the tokens are (in CSV separated by spaces). With --concurrency the arrival is
    optional, and a client sends all requests of a session, one after the other. The engine
    file needs max_num_seqs, max_num_batched_tokens, max_model_len and async_scheduling.

    Writes requests.parquet, steps.parquet and summary.json, and prints the summary; with
    --instances of all instances together and of each.

    \b
    Examples:
      blis-replay simulate --requests load.csv --engine engine.yaml \\
          --coefficients h100-vllm-0.15.1 --model codellama-34b-instruct-hf --out run
      blis-replay simulate --requests load.jsonl --engine engine.yaml \\
          --coefficients mine.yaml --out run --csv-tables --json
      blis-replay simulate --experiment mooncake --engine engine.yaml \\
          --coefficients mine.yaml --out run
      blis-replay simulate --workload load.yaml --engine engine.yaml \\
          --coefficients mine.yaml --out run --instances 4 --router least-loaded
      blis-replay simulate --requests load.csv --engine engine.yaml \\
          --coefficients mine.yaml --out run --concurrency 2 --slo ttft.p95=500ms,itl.mean=20ms
    """
    from blis_replay.base.errors import TraceError
    from blis_replay.blis.closed_loop import ClosedLoop
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import stored_experiment
    from blis_replay.validate.text.answer import page_json
    from blis_replay_labs.cluster.config import ClusterConfig, RoundRobin, router_of_text
    from blis_replay_labs.synthetic.request_table import read_request_table
    from blis_replay_labs.synthetic.simulation import (
        generated_table,
        read_engine,
        recorded_table,
        simulate_on_cluster,
        simulate_table,
        write_cluster_tables,
        write_tables,
    )
    from blis_replay_labs.synthetic.text import cluster_answer, cluster_summary, simulation_answer, summary

    if sum(given is not None for given in (requests_path, name, workload_path)) != 1:
        raise click.UsageError("name the requests with one of --requests FILE, --experiment NAME, --workload FILE")
    if router_text is not None and instances == 1:
        raise click.UsageError("--router chooses between instances; say how many with --instances")
    if concurrency is None and (think_ms is not None or ramp_s is not None):
        raise click.UsageError("--think-time and --ramp are of a closed loop; say how many clients with --concurrency")
    if instances > 1 and (concurrency is not None or objectives):
        raise click.UsageError("--concurrency and --slo are of one engine; leave --instances out")
    loop = concurrency and ClosedLoop(concurrency, round(1e6 * (ramp_s or 0)), round(1e3 * (think_ms or 0)))
    if not force and (there := sorted(name for name in _WRITTEN if (out / name).exists())):
        verb = "is" if len(there) == 1 else "are"
        raise click.UsageError(
            f"--out {out}: {' and '.join(there)} {verb} there already; choose another folder, or --force"
        )
    try:
        router = router_of_text(router_text) if router_text else RoundRobin()
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--router") from error
    release = release_on_gpu(load_release(coefficients), gpu, gpu_file)
    given = read_engine(engine_path)
    entry = given.entry(release, model, tensor_parallelism)
    if requests_path is not None:
        table = read_request_table(requests_path, given.engine.block_size, arrivals=not loop)
    elif workload_path is not None:
        table = generated_table(workload_path, given.engine)
    else:
        table = recorded_table(stored_experiment(store_path, str(name)), given.engine)
    table = table if loop else table.of_open_load()
    if instances > 1:
        pooled = simulate_on_cluster(table, ClusterConfig(instances, router), given.engine, release, entry)
        write_cluster_tables(pooled, out, csv_tables)
        answer = cluster_answer(cluster_summary(pooled))
    else:
        simulation = simulate_table(table, given.engine, release, entry, loop or None)
        write_tables(simulation, out, csv_tables)
        answer = simulation_answer(summary(simulation, objectives))
    write_whole(out / "summary.json", page_json(answer.document) + "\n")
    print_answer(answer)
