"""The verb ``blis-replay whatif``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.addons import needed_addon
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    another_gpu_options,
    coefficients_option,
    experiment_option,
    release_on_gpu,
    slo_option,
    store_option,
    verb,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers
    from blis_replay.validate.metrics.objectives import Objectives


@verb("whatif")
@experiment_option
@coefficients_option
@another_gpu_options
@click.option("--set", "fixed", multiple=True, metavar="ARGUMENT=VALUE", help="Change an engine argument, or the load.")
@click.option("--sweep", "swept", multiple=True, metavar="ARGUMENT=V1,V2,...", help="Several values; all combinations.")
@slo_option
@click.option(
    "--find",
    type=click.Choice(["rate", "concurrency"]),
    help="Search for the most load within the limits of --slo.",
)
@workers_option
@store_option
@form_options
def whatif_verb(
    name: str,
    fixed: tuple[str, ...],
    swept: tuple[str, ...],
    objectives: Objectives,
    find: str | None,
    coefficients: str | None,
    gpu: str | None,
    gpu_file: Path | None,
    store_path: Path,
    **workers: Unpack[Workers],
) -> None:
    """Replay the same requests with other engine arguments, or another load.

    Prints simulated latencies, throughput, depth, preemptions and KV use with the recorded
    arguments and the changed ones. The server was observed with the recorded ones only.
    The load changes like an argument: rate=1.5 lets requests arrive 1.5 times as fast,
    concurrency=16 has 16 clients send the same requests, each one when the one before is
    answered, think_time_ms=100 later, the first ones over ramp_s=10. With sessions=prompts
    a prompt that goes on where an earlier request ended is that client's next turn.
    --find rate searches for the most load within limits, with the recorded arguments and
    with each change.
    A combination that the engine cannot run, or that leaves no room for a request, is named
    with its reason; exit code 4 if that is so of all of them.

    \b
    Examples:
      blis-replay whatif 34b-general --set max_num_seqs=64
      blis-replay whatif 70b-general --set async_scheduling=false \\
          --sweep max_num_seqs=64,128,256 --sweep max_num_batched_tokens=2048,8192
      blis-replay whatif 34b-general --sweep concurrency=8,64 --slo ttft.p95=500ms
      blis-replay whatif 34b-codegen --find rate --slo ttft.p95=500ms
    """
    from blis_replay.ingest.store import open_for_reading, read_stored
    from blis_replay.validate.comparison.verdict_text import with_use
    from blis_replay.validate.experiment import find_experiment, given_options, release_for
    from blis_replay.validate.metrics.observed import pooled_gaps
    from blis_replay.validate.what_if import grid, mode_with, parse_value, what_if, whatif_answer

    settings, values = _pairs("--set", fixed), _pairs("--sweep", swept)
    if find and (not objectives or find in settings or find in values):
        problem = "give limits with --slo ttft.p95=500ms,itl.p95=50ms" if not objectives else f"leave {find} to it"
        raise click.UsageError(f"--find {find} searches for the most load within limits: {problem}")
    if not (settings or values or find):
        raise click.UsageError("say what is to change: --set max_num_seqs=256, or --sweep max_num_seqs=64,128,256")
    if both := sorted(set(settings) & set(values)):
        raise click.UsageError(f"{both[0]} is given by --set and by --sweep; use one of them")
    for argument, text in settings.items():
        if "," in text and argument != "cudagraph_capture_sizes":
            raise click.UsageError(
                f"--set {argument}={text}: that is several values; try each: --sweep {argument}={text}"
            )
    sweeps = {n: [parse_value(n, v) for v in dict.fromkeys(text.split(","))] for n, text in values.items()}
    changes = grid(tuple(sorted((n, parse_value(n, v)) for n, v in settings.items())), sweeps)
    for change in changes:
        mode_with((*change, (find, 1)) if find else change)
    search = needed_addon("whatif", "find", "--find") if find else None
    release = release_on_gpu(release_for(coefficients, [name]), gpu, gpu_file)
    with open_for_reading(store_path) as store:
        slug = find_experiment(store, name)
        recording = read_stored(store, slug)
        gaps = pooled_gaps(store, slug) if objectives and not find else None
    repeat_options = given_options(coefficients, store_path)
    if search:
        tried = [change for change in changes if change]
        with progress_line("searching") as progress:
            answer = search(recording, release, find, objectives, tried, repeat_options, progress=progress, **workers)
        print_answer(answer)
        return
    with progress_line("replaying") as progress:
        result = what_if(
            recording, release, changes, objectives=objectives, token_gaps=gaps, progress=progress, **workers
        )
    print_answer(with_use(whatif_answer(result, repeat_options), release, recording))


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        argument, equals, value = text.partition("=")
        if not equals or argument in pairs:
            problem = f"{argument} is given twice; give it once" if equals else f"no value; write {argument}=VALUE"
            raise click.UsageError(f"{option} {text}: {problem}")
        pairs[argument] = value
    return pairs
