"""The verbs that show what stands behind a verdict: ``explain``, ``report`` and ``timeline``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    DURATION,
    OUT_FILE,
    WINDOW,
    coefficients_option,
    experiment_option,
    experiments_options,
    history_option,
    release_option,
    repeat_option,
    replay_option,
    selector_option,
    store_option,
    verb,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers


@verb("explain")
@selector_option("")
@coefficients_option
@replay_option
@click.option("--window", type=WINDOW, default=(0.0, 1.0), help="Only requests of this share of the run, e.g. 0.6:1.")
@repeat_option
@click.option("--segments", is_flag=True, help="Add where the time of a request goes, observed and simulated.")
@workers_option
@store_option
def explain_verb(
    names: tuple[str, ...],
    coefficients: str | None,
    mode_text: str,
    window: tuple[float, float],
    repeats: tuple[str, ...],
    segments: bool,
    store_path: Path,
    **workers: Unpack[Workers],
) -> None:
    """Say which component of the simulator its error comes from.

    Replays the experiment with every set of components replaced by what was recorded, and gives
    each its Shapley value: its share of the error of mean and p99 of E2E, TTFT and ITL.  The
    shares and what is unexplained sum to the error.

    Of the levels of a sweep it explains the one that decides, below the verdict on all of them.

    With --segments also the way of a request on both sides: send to queue, queue wait, prefill,
    decode, delivery.  What was not recorded is merged into its neighbour and named.

    \b
    Examples:
      blis-replay explain tiny-live-d --segments
      blis-replay explain 34b-general --replay scheduling=synchronous
      blis-replay explain 34b-general --coefficients stepml-direct \\
          --replay prefix=none,scheduling=synchronous
      blis-replay explain 34b-general --coefficients mine.yaml --json
    """
    if not names:
        raise click.UsageError("name an experiment; list them with `blis-replay list`")
    from blis_replay.ingest.store import open_for_reading, read_stored
    from blis_replay.ingest.store.recordings import experiments_named
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.simulator import entry_of
    from blis_replay.validate.comparison.compare import with_repeats
    from blis_replay.validate.comparison.pages import below_verdict
    from blis_replay.validate.comparison.repeats import repeats_of
    from blis_replay.validate.comparison.segments import segments_of
    from blis_replay.validate.comparison.segments_text import with_segments
    from blis_replay.validate.comparison.validated import compare_experiment
    from blis_replay.validate.experiment import given_options, named_experiments, release_for
    from blis_replay.validate.explain.attribute import attribute
    from blis_replay.validate.explain.text import attribution_answer
    from blis_replay.validate.fit.next_recording import next_recording
    from blis_replay.validate.fit.text import with_next
    from blis_replay.validate.metrics.observed import Selection, observed_requests, on_both_sides, pooled_gaps

    mode, sweep = parse_mode(mode_text), None
    # Open for all of it: each of many replays looks into the recording.
    with open_for_reading(store_path) as store, progress_line("replaying") as progress:
        slugs = named_experiments(store, names)
        release = release_for(coefficients, slugs)
        of_slug = repeats_of(store, slugs, repeats)
        compared = {
            slug: with_repeats(compare_experiment(store, slug, release, mode, window), of_slug.get(slug))
            for slug in slugs
        }
        if len(slugs) > 1:
            from blis_replay.validate.comparison.sweep import below_sweep, one_sweep

            sweep = one_sweep([*compared.values()])
            slugs = [sweep.levels[sweep.decides].slug]
        recording = read_stored(store, slugs[0])
        selection = Selection(window=window)
        chosen = observed_requests(recording) & selection.of(recording.requests)
        gaps = pooled_gaps(store, recording.slug, chosen)
        judged = compared[recording.slug]
        attribution = attribute(
            recording,
            release,
            mode,
            token_gaps=gaps,
            options=given_options(coefficients, store_path),
            errors=judged.estimates,
            window=window,
            progress=progress,
            **workers,
        )
        if judged.repeats is not None:
            attribution = replace(attribution, recordings=len(judged.repeats.recordings))
        shown = on_both_sides(judged.run) & selection.of(judged.run.recording.requests)
        way = segments_of(judged.run, selection) if shown.any() else None
        entry = entry_of(release, recording)
        fitted_on = {score.experiment for score in entry.fit.scores} if entry.fit else set()
        here = [read_stored(store, slug) for slug in experiments_named(store) if slug in fitted_on]
        asked = next_recording(entry, here or [recording])
    answer = with_segments(with_next(attribution_answer(attribution), asked), way, shown=segments)
    answer = below_verdict(answer, judged)
    print_answer(answer if sweep is None else below_sweep(answer, sweep))


@verb("report")
@experiments_options
@coefficients_option
@release_option("--baseline", help_text="Another one, shown below it in the overview.")
@replay_option
@click.option("--out", "-o", type=OUT_FILE, default="report.html", help="The page.  [default: report.html]")
@history_option
@click.option("--open", "browse", is_flag=True, help="Show the page in a browser.")
@workers_option
@store_option
def report_verb(
    names: tuple[str, ...],
    everything: bool,
    out: Path,
    browse: bool,
    history: Path | None,
    coefficients: str | None,
    baseline: str | None,
    mode_text: str,
    store_path: Path,
    **workers: Unpack[Workers],
) -> None:
    """Write one HTML page with the verdicts and all of their evidence.

    Opens offline and loads nothing. First the errors of all experiments, the worst on top. Then
    for each one the verdict and its cause, distributions, errors over time, steps beside the
    latency model, the parts of the error, instrument findings, and what it all depends on.
    The exit code is 0 once it is written, whatever the verdicts: `gate` is there to fail.

    \b
    Examples:
      blis-replay report 34b-general --open
      blis-replay report 34b-general --replay scheduling=synchronous
      blis-replay report --all --coefficients mine.yaml --out mine.html
    """
    if bool(names) == everything:
        raise click.UsageError("name experiments, or use --all")
    if out.suffix not in (".html", ".htm"):
        raise click.UsageError(f"--out {out}: the report is a page of HTML; name a .html file")
    with progress_line("reporting") as progress:
        from blis_replay.ingest.store import open_for_reading
        from blis_replay.replay.mode import parse_mode
        from blis_replay.replay.release_file import load_release
        from blis_replay.validate.experiment import given_options, named_experiments, release_for
        from blis_replay.validate.history import history_of, read
        from blis_replay.validate.report.report import report, report_answer

        release = release_for(coefficients)
        mode = parse_mode(mode_text)
        asked = ["--all"] if everything else list(names)
        shown = None if history is None else str(history)
        given = {"--coefficients": coefficients, "--baseline": baseline, "--replay": mode_text, "--history": shown}
        given["--out"] = out.name
        chosen = [part for option, value in given.items() if value for part in (option, value)]
        command = shlex.join(["blis-replay", "report", *asked, *chosen])
        with open_for_reading(store_path) as store:
            slugs = named_experiments(store, None if everything else names)
        before = load_release(baseline) if baseline else None
        replayed = "" if mode_text == "exact" else f" --replay {shlex.quote(mode_text)}"
        written = report(
            store_path,
            slugs,
            release,
            mode,
            baseline=before,
            history=None if history is None else history_of(read(history)),
            ships=coefficients is None,
            command=command,
            options=replayed + given_options(coefficients, store_path),
            progress=progress,
            **workers,
        )
    size = write_whole(out, written.html)
    print_answer(report_answer(written, out, size))
    if browse:
        click.launch(str(out.absolute()))


@verb("timeline")
@experiment_option
@coefficients_option
@replay_option
@click.option("--from", "from_us", type=DURATION, help="Where the window begins.  [default: 0s]")
@click.option("--for", "length_us", type=DURATION, help="How long it is.  [default: 5s]")
@click.option("--around", type=click.Choice(["worst"]), help="Or: from the request with the largest error on.")
@click.option("--request", metavar="ID", help="Or: this request, and only its lanes.")
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The .json file (Chrome trace events).")
@store_option
def timeline_verb(
    name: str,
    from_us: int | None,
    length_us: int | None,
    around: str | None,
    request: str | None,
    out: Path,
    coefficients: str | None,
    mode_text: str,
    store_path: Path,
) -> None:
    """Write a window of a run for a trace viewer, observed and simulated on one clock.

    Open the file at ui.perfetto.dev or in chrome://tracing.  It has the steps of either side with
    their batches, running and waiting requests, KV cache use and errors, and two lanes per request: queue wait,
    prefill, decode, preempted.  What was not recorded is absent, and named on standard error.

    \b
    Examples:
      blis-replay timeline 34b-general --from 600s --for 500ms --out trace.json
      blis-replay timeline mine --around worst --for 2s --out trace.json
      blis-replay timeline mine --request cmpl-17 --out trace.json
    """
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import parse_mode
    from blis_replay.validate.experiment import release_for, stored_experiment
    from blis_replay.validate.timeline.viewer_files import write_timeline
    from blis_replay.validate.timeline.window import timeline, timeline_answer, window_named

    if out.suffix != ".json":
        raise click.UsageError(f"--out {out}: name a .json file (Chrome trace events)")
    if sum(given is not None for given in (from_us, around, request)) > 1:
        raise click.UsageError("--from, --around and --request each name a window; leave all but one out")
    if length_us == 0:
        raise click.UsageError("--for 0 is not a window; give a time such as 500ms")
    release = release_for(coefficients, [name])
    run = replay(stored_experiment(store_path, name), release, parse_mode(mode_text))
    window = window_named(run, from_us, length_us, around, request)
    shown = timeline(run, window.from_us, window.until_us, window.request_index)
    if window.remark:
        shown = replace(shown, remarks=(window.remark, *shown.remarks), worst=window.worst)
    write_timeline(shown, out)
    if shown.absent:
        click.echo(f"absent, because not recorded: {'; '.join(shown.absent)}", err=True)
    print_answer(timeline_answer(shown, out))
