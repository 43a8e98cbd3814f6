"""``blis-replay gate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import (
    OUT_FILE,
    complete_releases,
    executor_options,
    form_options,
    print_answer,
    repeat_option,
    selector_option,
    store_option,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName


@verb("gate")
@selector_option("all of the models that the candidate has")
@click.option(
    "--coefficients",
    required=True,
    metavar="RELEASE",
    help="The candidate: a release that ships, or a YAML file.",
    shell_complete=complete_releases,
)
@click.option(
    "--baseline",
    "baseline_name",
    default=None,
    metavar="RELEASE",
    shell_complete=complete_releases,
    help="The release in use; the candidate must not be worse.",
)
@click.option(
    "--policy",
    "policy_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="A gate policy.  [default: means within E2E 10 %, TTFT 15 %, ITL 15 %]",
)
@click.option("--extrapolate", is_flag=True, help="Judge also on another GPU, data type or tensor parallelism.")
@click.option("--junit", type=OUT_FILE, default=None, metavar="FILE", help="Write the checks as JUnit XML too.")
@click.option("--summary", type=OUT_FILE, default=None, metavar="FILE", help="Write Markdown for a pull request too.")
@repeat_option
@executor_options
@store_option
@form_options
def command(
    names: tuple[str, ...],
    coefficients: str,
    baseline_name: str | None,
    policy_path: Path | None,
    extrapolate: bool,
    junit: Path | None,
    summary: Path | None,
    repeats: tuple[str, ...],
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    form: str | None,
) -> int:
    """May this coefficient release be used?

    Replays the experiments with the candidate and holds the errors against the policy:
    thresholds, no significant regression against the baseline (the change of each
    absolute error under resampled requests), no inversion of the order of p99s between
    experiments, enough experiments judged.  Overloaded recordings are judged by what was
    served.

    Exit codes: 0 pass, 1 fail, 2 wrong use, 3 could not be judged.

    \b
    Examples:
      blis-replay gate --coefficients mine.yaml
      blis-replay gate --coefficients mine.yaml --baseline h100-vllm-0.15.1
      blis-replay gate --coefficients mine.yaml --experiment monday --repeat tuesday
      blis-replay gate --coefficients mine.yaml --policy policy.yaml --experiment '34b-*'
      blis-replay gate --coefficients mine.yaml --junit gate.xml --summary gate.md
    """
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.gating.gate import gate
    from blis_replay.validate.gating.policy import load_policy
    from blis_replay.validate.gating.reports import gate_answer, gate_junit, gate_markdown

    policy = load_policy(policy_path)
    candidate = load_release(coefficients)
    baseline = load_release(baseline_name) if baseline_name else None
    with open_for_reading(store_path) as store, progress_line("judging") as progress:
        report = gate(
            store,
            candidate,
            baseline,
            policy,
            names,
            extrapolate=extrapolate,
            repeats=repeats,
            executor=executor,
            workers=workers,
            progress=progress,
        )
    if junit is not None:
        write_whole(junit, gate_junit(report))
    if summary is not None:
        write_whole(summary, gate_markdown(report))
    return print_answer(form, gate_answer(report))
