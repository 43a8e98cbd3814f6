"""``blis-replay gate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.options import executor_options, json_option, print_json, progress_line, store_option

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName

_EXIT_CODES = {"pass": 0, "fail": 1, "not judged": 3}
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("gate")
@click.option("--coefficients", required=True, help="The candidate: a release that ships, or a YAML file.")
@click.option("--baseline", "baseline_name", default=None, help="The release in use; the candidate must not be worse.")
@click.option(
    "--policy",
    "policy_path",
    type=_FILE,
    default=None,
    help="A gate policy.  [default: means within E2E 10 %, TTFT 15 %, ITL 15 %]",
)
@click.option(
    "--experiments",
    "selectors",
    multiple=True,
    metavar="SELECTOR",
    help="Slug, alias or pattern such as '34b-*'; may be given several times.  "
    "[default: all of the models that the candidate has]",
)
@click.option("--extrapolate", is_flag=True, help="Judge also on another GPU, data type or tensor parallelism.")
@click.option("--junit", type=_FILE, default=None, metavar="FILE", help="Write the checks as JUnit XML too.")
@click.option("--markdown", type=_FILE, default=None, metavar="FILE", help="Write a summary for a pull request too.")
@executor_options
@store_option
@json_option
def command(
    coefficients: str,
    baseline_name: str | None,
    policy_path: Path | None,
    selectors: tuple[str, ...],
    extrapolate: bool,
    junit: Path | None,
    markdown: Path | None,
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """May this coefficient release be used?

    Replays the experiments with the candidate and holds the errors against the policy:
    thresholds, no significant regression against the baseline (the change of each
    absolute error under resampled requests), no inversion of the order of p99s between
    experiments, enough experiments judged.  Overloaded recordings are shown, not gated.

    Exit codes: 0 pass, 1 fail, 2 wrong use, 3 could not be judged.

    \b
    Examples:
      blis-replay gate --coefficients mine.yaml
      blis-replay gate --coefficients mine.yaml --baseline h100-vllm-0.15.1
      blis-replay gate --coefficients mine.yaml --policy policy.yaml --experiments '34b-*'
      blis-replay gate --coefficients mine.yaml --junit gate.xml --markdown summary.md
    """
    from blis_replay.ingest.store import open_store
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.gating.gate import gate
    from blis_replay.validate.gating.policy import load_policy

    policy = load_policy(policy_path)
    candidate = load_release(coefficients)
    baseline = load_release(baseline_name) if baseline_name else None
    with open_store(store_path) as store:
        report = gate(
            store,
            candidate,
            baseline,
            policy,
            selectors,
            extrapolate=extrapolate,
            executor=executor,
            workers=workers,
            progress=progress_line("experiments judged"),
        )
    if junit is not None:
        from blis_replay.validate.gating.report_junit import gate_junit

        junit.write_text(gate_junit(report), "utf-8")
    if markdown is not None:
        from blis_replay.validate.gating.report_markdown import gate_markdown

        markdown.write_text(gate_markdown(report), "utf-8")
    if as_json:
        from blis_replay.validate.gating.report_json import gate_json

        print_json(gate_json(report))
    else:
        from blis_replay.validate.gating.report_text import gate_text

        click.echo(gate_text(report))
    return _EXIT_CODES[report.verdict]
