"""The verbs that fit coefficients and judge them: ``blis-replay calibrate`` and ``gate``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    FILE,
    OUT_FILE,
    WINDOW,
    Shares,
    record_option,
    release_option,
    repeat_option,
    selector_option,
    store_option,
    verb,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers


SPLIT = Shares(
    *("fit:choose", "a split; write e.g. 0.6:0.8", "a split; use 0 < fit <= choose <= 1"),
    lambda fit, choose: 0 < fit <= choose <= 1,
)


@verb("calibrate")
@selector_option("", "--train")
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")
@click.option("--name", help="Name of the release.  [default: the file's]")
@click.option(
    "--from",
    "data",
    type=click.Choice(["auto", "steps", "latencies"]),
    default="auto",
    metavar="auto|steps|latencies",
    help="Fit to step records, latencies, or both.  [default: auto]",
)
@click.option(
    "--split",
    type=SPLIT,
    default=(0.6, 0.8),
    help="Fit to this share of each run, choose the form up to the second, test on the rest.  [default: 0.6:0.8]",
)
@click.option("--window", type=WINDOW, default=(0.0, 1.0), help="Use only this share of each run, e.g. 0.2:1.")
@release_option("--prior", help_text="For what cannot be determined.  [default: h100-datasheet]")
@release_option(
    "--operators",
    help_text="Operator times to scale (`coefficients make --operators`).",
)
@click.option("--force", is_flag=True, help="Write also a fit that misses, and over another file.")
@workers_option
@store_option
def calibrate_verb(
    names: tuple[str, ...],
    out: Path,
    name: str | None,
    data: str,
    split: tuple[float, float],
    window: tuple[float, float],
    prior: str | None,
    operators: str | None,
    force: bool,
    store_path: Path,
    **workers: Unpack[Workers],
) -> int:
    """Fit step times and delays per model and write a coefficient release.

    Step records give start-to-start step cycles. Latencies are fitted through the
    simulator: mean E2E and TTFT of small windows of requests, or of each load level of a
    table. A coefficient that neither determines keeps its prior, and is marked. Steps that
    were held up (a cold start, a machine that stood still) are left out, and named.
    A fit that misses what it was fitted to is not written, and the exit code is 1.

    \b
    Examples:
      blis-replay calibrate 7b-train --out mine.yaml
      blis-replay calibrate tiny-live-a tiny-live-c --out cpu.yaml
      blis-replay calibrate '7b-*' --from latencies --json --out 7b.yaml
      blis-replay calibrate 7b-train --split 0.6:0.6 --out first.yaml
      blis-replay calibrate mine --prior old.yaml --split 1:1 --out new.yaml
      blis-replay calibrate 7b-train --window 0.2:1 --out settled.yaml
    """
    from blis_replay.base.addons import needed_addon
    from blis_replay.blis.releases.release import CoefficientRelease
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import given_options
    from blis_replay.validate.fit.calibrate import (
        ModelFit,
        Options,
        calibrate,
        calibrate_to,
        judged_next,
        training_recordings,
    )
    from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
    from blis_replay.validate.fit.text import calibration_answer

    if not names:
        raise click.UsageError("name what to fit to, e.g. `blis-replay calibrate 7b-train --out mine.yaml`")
    with open_for_reading(store_path) as store:
        recordings, left_out = training_recordings(store, names, data)  # type: ignore[arg-type]  # click checked it
        to_judge = judged_next(store, recordings)
    options = Options(load_release(prior or DEFAULT_PRIOR), data, split, window=window)  # type: ignore[arg-type]  # click checked it
    source = f"blis-replay calibrate {' '.join(map(quote, names))}"
    release_name = name or out.stem
    if operators is not None and window != (0.0, 1.0):
        raise click.UsageError("--operators takes all of each run; leave --window out")

    def fitted() -> tuple[CoefficientRelease, list[ModelFit]]:
        if operators is not None:
            calibrate_operators = needed_addon("fit", "operators", "calibrate --operators")
            found: tuple[CoefficientRelease, list[ModelFit]] = calibrate_operators(
                recordings, release_name, load_release(operators), options, source
            )
            return found
        with progress_line("fitting models") as progress:
            return calibrate(recordings, release_name, options, source, progress=progress, **workers)

    file = calibrate_to(out, release_name, recordings, fitted, force=force)
    again = given_options(str(out), store_path)
    if to_judge == recordings[0].alias and window != (0.0, 1.0):
        again += f" --window {window[0]:g}:{window[1]:g}"
    return print_answer(calibration_answer(file, recordings, (to_judge, again), left_out))


@verb("gate")
@click.argument("coefficients", metavar="RELEASE")
@selector_option("all of the models that the candidate has")
@release_option("--baseline", "baseline_name", help_text="The release in use, to be no worse than.")
@click.option("--policy", "policy_path", type=FILE, help="Limits as YAML.  [default: those of `validate`]")
@click.option("--extrapolate", is_flag=True, help="Judge also on another GPU, data type or TP.")
@click.option("--junit", type=OUT_FILE, metavar="FILE", help="Write the checks as JUnit XML too.")
@click.option("--summary", type=OUT_FILE, metavar="FILE", help="Write Markdown for a pull request too.")
@record_option
@repeat_option
@workers_option
@store_option
def gate_verb(
    names: tuple[str, ...],
    coefficients: str,
    baseline_name: str | None,
    policy_path: Path | None,
    extrapolate: bool,
    junit: Path | None,
    summary: Path | None,
    history: Path | None,
    repeats: tuple[str, ...],
    store_path: Path,
    **workers: Unpack[Workers],
) -> int:
    """May this coefficient release be used?

    RELEASE is the candidate, a name or a YAML file.  Replays the experiments with it and judges
    each as `validate` does, with the limits of the policy.  Against a baseline, no absolute
    error may grow by more than the margin.  The order of p99s between experiments must not be inverted, and enough
    experiments must have been judged.  Experiments that the candidate was fitted on, and those
    of a release that does not say, are shown and not counted (held_out_only of the policy).

    Exit codes: 0 PASS (FITS where fitted runs count), 1 FAIL, 2 wrong use, 3 UNDECIDED,
    4 NOT JUDGED.

    \b
    Examples:
      blis-replay gate mine.yaml
      blis-replay gate mine.yaml --baseline h100-vllm-0.15.1
      blis-replay gate mine.yaml monday --repeat tuesday
      blis-replay gate mine.yaml '34b-*' --policy policy.yaml
      blis-replay gate mine.yaml --junit gate.xml --summary gate.md
    """
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import given_options
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
            progress=progress,
            **workers,
        )
    if junit is not None:
        write_whole(junit, gate_junit(report))
    if summary is not None:
        write_whole(summary, gate_markdown(report))
    if history is not None:
        from blis_replay.validate.history import record

        judged = [(of, one.outcome or of.verdict) for one in report.judgements if (of := one.judgement)]
        record(history, judged, [one.slug for one in report.judgements if one.judgement is None], "embedded")
    return print_answer(gate_answer(report, given_options(None, store_path), (baseline_name, coefficients)))
