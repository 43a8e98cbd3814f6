"""The verb ``blis-replay simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.addons import needed_addon
from blis_replay.validate.cli.answers import print_answer, set_out_file
from blis_replay.validate.cli.options import (
    FILE,
    FOLDER,
    OUT_FILE,
    PlacePath,
    coefficients_option,
    gpu_file_option,
    one_experiment,
    slo_option,
    store_option,
    verb,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blis_replay.blis.releases.release import CoefficientRelease
    from blis_replay.replay.executors import Workers
    from blis_replay.replay.mode import EngineOverrides
    from blis_replay.validate.metrics.objectives import Objectives
    from blis_replay.validate.text.answer import Answer


@verb("simulate")
@click.option("--requests", type=FILE, help="With --engine: a table of requests.")
@one_experiment(required=False)
@coefficients_option
@click.option("--model", metavar="NAME", help="Which model of the release, where it has several.")
@click.option(
    "--gpu", metavar="NAME", help="Another GPU, for a release of kind physical.  [default: that of --gpu-file]"
)
@gpu_file_option
@click.option("--set", "fixed", multiple=True, metavar="ARGUMENT=VALUE", help="Change an engine argument, or the load.")
@click.option("--sweep", "swept", multiple=True, metavar="ARGUMENT=V1,V2", help="Several values; all combinations.")
@slo_option
@click.option(
    "--find",
    type=click.Choice(["rate", "concurrency"]),
    metavar="LOAD",
    help="The most load within --slo: rate or concurrency.",
)
@click.option("--engine", type=FILE, help="YAML with engine arguments under vLLM's names.")
@click.option("--instances", type=click.IntRange(1, 1000), metavar="N", help="With --engine: engines of a cluster.")
@click.option("--router", metavar="NAME", help="Who gets a request, such as least-loaded.")
@click.option("--to", "target", type=click.Choice(["tracev2", "mooncake"]), metavar="FORMAT", help="See above.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@click.option("--out", "-o", type=PlacePath())
@workers_option
@store_option
def simulate_verb(
    name: str | None,
    requests: Path | None,
    engine: Path | None,
    model: str | None,
    instances: int | None,
    router: str | None,
    target: str | None,
    force: bool,
    out: Path | None,
    fixed: tuple[str, ...],
    swept: tuple[str, ...],
    objectives: Objectives,
    find: str | None,
    coefficients: str | None,
    gpu: str | None,
    gpu_file: Path | None,
    store_path: Path,
    **workers: Unpack[Workers],
) -> int:
    """Simulate requests with other engine arguments, or another load.

    Of a recording, prints simulated latencies, throughput and use of the engine as
    recorded and as changed. The load changes like an argument: rate=1.5, concurrency=16
    (clients that wait), think_time_ms=100, ramp_s=10, sessions=prompts.
    With --engine (a lab), simulates the requests on that engine; -o DIR gets tables.
    With --to tracev2 or mooncake (a lab), writes the requests for other simulators to -o.

    \b
    Examples:
      blis-replay simulate 34b-general --set max_num_seqs=64
      blis-replay simulate 34b-general --sweep max_num_seqs=64,128 \\
          --sweep async_scheduling=true,false
      blis-replay simulate 34b-codegen --find rate --slo ttft.p95=500ms
      blis-replay simulate --requests load.csv --engine engine.yaml -o run \\
          --coefficients h100-vllm-0.15.1 --model codellama-34b-instruct-hf
    """
    from blis_replay.validate.experiment import given_options, stored_experiment

    if target is not None:
        if name is None or requests or engine or fixed or swept or find:
            raise click.UsageError("--to writes the requests of an experiment as they are; name one, and nothing else")
        export = needed_addon("simulate", "export", "--to")
        return print_answer(export(stored_experiment(store_path, name), target, out, force=force), "simulate-export")
    changes = _changes(fixed, swept, objectives, find)
    if requests or engine:
        if (requests is None) == (name is None) or engine is None:
            raise click.UsageError("--engine FILE simulates an experiment, or --requests FILE; name one of the two")
        if swept or find:
            raise click.UsageError("--sweep and --find go with the engine of a recording; leave --engine out")
        if coefficients is None or out is None:
            raise click.UsageError("--engine needs --coefficients RELEASE, and a folder for the tables: -o DIR")
        simulated = needed_addon("simulate", "requests", "--engine")
        answer = simulated(
            requests or stored_experiment(store_path, str(name)),
            engine,
            _release(coefficients, [], gpu, gpu_file),
            model,
            changes[0],
            instances=instances,
            router_text=router,
            objectives=objectives,
            out=FOLDER.convert(out, None, click.get_current_context()),
            force=force,
        )
        return print_answer(answer, "simulate-requests")
    if model or instances or router or force:
        raise click.UsageError("--model, --instances, --router and --force go with --engine FILE; name one")
    if name is None:
        raise click.UsageError("name an experiment; list them with `blis-replay list`")
    if not (fixed or swept or find):
        raise click.UsageError("say what is to change: --set max_num_seqs=256, or --sweep max_num_seqs=64,128,256")
    ctx = click.get_current_context()
    set_out_file(ctx, ctx.command.params[0], None if out is None else OUT_FILE.convert(out, None, ctx))
    search = needed_addon("simulate", "find", "--find") if find else None
    release = _release(coefficients, [name], gpu, gpu_file)
    repeat_options = given_options(coefficients, store_path)
    if search:
        tried = [change for change in changes if change]
        recording = stored_experiment(store_path, name)
        with progress_line("searching") as progress:
            answer = search(recording, release, find, objectives, tried, repeat_options, progress=progress, **workers)
        return print_answer(answer)
    return print_answer(_what_if(name, release, changes, objectives, store_path, repeat_options, **workers))


def _release(coefficients: str | None, names: list[str], gpu: str | None, gpu_file: Path | None) -> CoefficientRelease:
    """The release that is named, or the one that ships for the experiments, on the GPU that is named."""
    from blis_replay.validate.experiment import release_for

    release = release_for(coefficients, names)
    if gpu is None and gpu_file is None:
        return release
    from blis_replay.replay.other_hardware import chosen_gpu, on_gpu

    return on_gpu(release, chosen_gpu(gpu, gpu_file))


def _what_if(
    name: str,
    release: CoefficientRelease,
    changes: Sequence[EngineOverrides],
    objectives: Objectives,
    store_path: Path,
    repeat_options: str,
    **workers: Unpack[Workers],
) -> Answer:
    """A recording as it was, and with each of the changes."""
    from blis_replay.ingest.store import open_for_reading, read_stored
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.metrics.observed import pooled_gaps
    from blis_replay.validate.what_if import judged_as_recorded, what_if, whatif_answer

    with progress_line("replaying") as progress:
        with open_for_reading(store_path) as store:
            slug = find_experiment(store, name)
            recording = read_stored(store, slug)
            gaps = pooled_gaps(store, slug) if objectives else None
            judged = judged_as_recorded(store, slug, release)
        result = what_if(
            recording, release, changes, objectives=objectives, token_gaps=gaps, progress=progress, **workers
        )
    return whatif_answer(result, repeat_options, judged)


def _changes(
    fixed: tuple[str, ...], swept: tuple[str, ...], objectives: Objectives, find: str | None
) -> list[EngineOverrides]:
    """What --set and --sweep change, a combination each; one at least, which may be empty."""
    from blis_replay.validate.what_if import grid, mode_with, parse_value

    settings, values = _pairs("--set", fixed), _pairs("--sweep", swept)
    if find and (not objectives or find in settings or find in values):
        problem = "give limits with --slo ttft.p95=500ms,itl.p95=50ms" if not objectives else f"leave {find} to it"
        raise click.UsageError(f"--find {find} searches for the most load within limits: {problem}")
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
    return changes


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        argument, equals, value = text.partition("=")
        if not equals or argument in pairs:
            problem = f"{argument} is given twice; give it once" if equals else f"no value; write {argument}=VALUE"
            raise click.UsageError(f"{option} {text}: {problem}")
        pairs[argument] = value
    return pairs
