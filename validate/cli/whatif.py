"""``blis-replay whatif``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.options import (
    coefficients_option,
    executor_options,
    experiment_option,
    form_options,
    print_answer,
    store_option,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName
    from blis_replay.validate.load_search import Load


@verb("whatif")
@experiment_option
@coefficients_option
@click.option(
    "--set", "fixed", multiple=True, metavar="ARGUMENT=VALUE", help="Change an engine argument, or the load (below)."
)
@click.option(
    "--sweep", "swept", multiple=True, metavar="ARGUMENT=V1,V2,...", help="Try several values; all combinations."
)
@click.option(
    "--slo",
    "slo",
    default=None,
    metavar="LIMITS",
    help="Say whether limits such as ttft.p95=500ms,itl.p95=50ms hold, and what share of the requests is within them.",
)
@click.option(
    "--find",
    type=click.Choice(["rate", "concurrency"]),
    default=None,
    help="Search for the most load within the limits of --slo: how many times as fast the recorded requests may "
    "come, or how many clients may send them.",
)
@executor_options
@store_option
@form_options
def command(
    name: str,
    fixed: tuple[str, ...],
    swept: tuple[str, ...],
    slo: str | None,
    find: Load | None,
    coefficients: str | None,
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    form: str | None,
) -> None:
    """Replay the same requests with other engine arguments, or another load.

    Prints simulated latencies, throughput, depth, preemptions and KV use with the recorded
    arguments and the changed ones. The server was observed with the recorded ones only.
    The load changes like an argument: rate=1.5 lets requests arrive 1.5 times as fast,
    concurrency=16 has 16 clients send the same requests, each one when the one before is
    answered, think_time_ms=100 later, the first ones over ramp_s=10. --find rate searches
    for the most load within limits, with the recorded arguments and with each change.
    A combination that the engine cannot run, or that leaves no room for a request, is named
    with its reason; exit code 3 if that is so of all of them.

    \b
    Examples:
      blis-replay whatif 34b-general --set max_num_seqs=64
      blis-replay whatif 70b-general --set async_scheduling=false \\
          --sweep max_num_seqs=64,128,256 --sweep max_num_batched_tokens=2048,8192
      blis-replay whatif 34b-general --sweep concurrency=8,64 --slo ttft.p95=500ms,itl.p95=20ms
      blis-replay whatif 34b-codegen --find rate --slo ttft.p95=500ms,itl.p95=20ms
      blis-replay whatif 7b-reasoning --set num_gpu_blocks=none --json
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.engine_arguments import grid, mode_with, parse_value, what_if, whatif_answer
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment
    from blis_replay.validate.load_search import find_most, load_answer
    from blis_replay.validate.metrics.objectives import parse_objectives

    settings, values = _pairs("--set", fixed), _pairs("--sweep", swept)
    if find and (slo is None or find in settings or find in values):
        problem = "give limits with --slo ttft.p95=500ms,itl.p95=50ms" if slo is None else f"leave {find} to it"
        raise click.UsageError(f"--find {find} searches for the most load within limits: {problem}")
    if not (settings or values or find):
        raise click.UsageError("say what is to change: --set max_num_seqs=256, or --sweep max_num_seqs=64,128,256")
    if both := sorted(set(settings) & set(values)):
        raise click.UsageError(f"{both[0]} is given by --set and by --sweep; use one of them")
    sweeps = {n: [parse_value(n, v) for v in dict.fromkeys(text.split(","))] for n, text in values.items()}
    changes = grid(tuple(sorted((n, parse_value(n, v)) for n, v in settings.items())), sweeps)
    for change in changes:
        mode_with((*change, (find, 1)) if find else change)
    objectives = parse_objectives(slo) if slo is not None else ()
    release = load_release(coefficients or DEFAULT_RELEASE)
    recording = stored_experiment(store_path, name)
    if find:
        tried = [change for change in changes if change]
        with progress_line("searching") as progress:
            most = find_most(
                recording, release, find, objectives, tried, executor=executor, workers=workers, progress=progress
            )
        print_answer(form, load_answer(recording, release, find, objectives, most))
        return
    with progress_line("replaying") as progress:
        found = what_if(
            recording,
            release,
            changes,
            objectives=objectives,
            executor=executor,
            workers=workers,
            progress=progress,
        )
    print_answer(form, whatif_answer(found))


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        argument, equals, value = text.partition("=")
        if not equals or argument in pairs:
            problem = "is given twice" if equals else "has no value"
            raise click.UsageError(f"{option} {text}: {argument} {problem}; write {option} max_num_seqs=256 once")
        pairs[argument] = value
    return pairs
