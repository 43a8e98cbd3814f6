"""The verbs of the command line as functions.

::

    from blis_replay.validate import api as br

    print(br.validate("34b-general"))                                 # the page of the command line
    br.validate("34b-general").frame                                  # its numbers, a polars frame
    br.explain("34b-general", replay="scheduling=synchronous").document   # as --json has it

Most return an ``Answer``: printed it is the page of the command line, ``.frame`` are its rows, ``.document`` its JSON
values, and ``.exit_code`` is what the command ends with.  A notebook shows the verdict as the report does.

``name`` is a slug or alias of an experiment, stored or bundled; ``coefficients`` a release that ships or a YAML file
(None: the one that ships for it); ``replay`` a mode as ``validate --replay`` takes it.  ``store`` is the file of the
ground-truth store, by default that of the command line.  Errors are ``BlisReplayError``, one line each that says what
to do (``base/errors.py``).  Each function has an example, which tests run; ``mine`` stands for a recording of your own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

import polars as pl

from blis_replay.base.files import write_whole
from blis_replay.blis.result import step_column
from blis_replay.fixtures.catalogue import profile_of
from blis_replay.ingest.ingest import ingest_source, outcomes_table
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import open_for_reading, read_stored
from blis_replay.replay import driver
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.mode import EngineValue, parse_mode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import Simulator
from blis_replay.replay.simulators import SimulatorInputs, simulator_named
from blis_replay.validate import STORE_DEFAULT
from blis_replay.validate.comparison.differences import differences, differences_answer
from blis_replay.validate.comparison.named_sides import Choice, side_of
from blis_replay.validate.comparison.pages import below_verdict, comparison_answer
from blis_replay.validate.comparison.segments import segment_frame, segments_of
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.experiment import (
    all_experiments,
    find_experiment,
    given_options,
    release_for,
    stored_experiment,
)
from blis_replay.validate.explain.attribute import attribute
from blis_replay.validate.explain.text import attribution_answer
from blis_replay.validate.fit.calibrate import Options, calibrate_to, judged_next, training_recordings
from blis_replay.validate.fit.calibrate import calibrate as calibrated
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.fit.text import calibration_answer
from blis_replay.validate.gating.gate import gate as gated
from blis_replay.validate.gating.policy import load_policy
from blis_replay.validate.gating.reports import gate_answer
from blis_replay.validate.inspection import experiments_answer, inspected
from blis_replay.validate.metrics.observed import observed_requests, pooled_gaps
from blis_replay.validate.report.page import card
from blis_replay.validate.report.report import Report
from blis_replay.validate.report.report import report as reported
from blis_replay.validate.text.answer import Answer, frame
from blis_replay.validate.timeline.window import Timeline, timeline
from blis_replay.validate.what_if import judged_as_recorded, what_if, whatif_answer

_StorePath = Path | str | None


def ingest(
    *paths: Path | str,
    engine: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
    model: str | None = None,
    replace: bool = False,
    store: _StorePath = None,
) -> pl.DataFrame:
    """Read experiments into the store; a row each: slug, alias, outcome, and how much was read.

    ``paths``: directories, files and patterns, as ``blis-replay ingest`` takes them.  ``engine``: a YAML file of engine
    arguments.  ``columns``: of a table, ``{"ttft": "first_token_after:ms"}``.  ``model``: what was served.
    ``replace``: store also what has fewer requests or steps than what is stored.

    Raises ``RecordingError`` for the first that cannot be read.

    Example: ``br.ingest("runs/mine")``
    """
    path, engine_file = _store(store), Path(engine) if engine else None
    said = None if columns is None else ",".join(f"{field}={column}" for field, column in columns.items())
    outcomes = [
        ingest_source(path, source, profile=profile_of(source.slug), engine_file=engine_file, even_worse=replace)
        for source in sources_of([str(path) for path in paths], columns=said, model=model)
    ]
    return frame(outcomes_table(outcomes))


def list(store: _StorePath = None) -> Answer:
    """What is stored and what ships; a row per experiment.

    Example: ``br.list().frame``
    """
    return experiments_answer(_store(store))


def load(name: str, store: _StorePath = None) -> Recording:
    """The recording of an experiment, as every function here reads it.

    Example: ``br.load("7b-train").requests.frame()``
    """
    return stored_experiment(_store(store), name)


def inspect(name: str, store: _StorePath = None) -> Answer:
    """What a recording holds and what its instrument checks found; a row per finding.

    Example: ``br.inspect("7b-train").frame``
    """
    return inspected(_store(store), name)


def replay(name: str, coefficients: str | None = None, replay: str = "exact", store: _StorePath = None) -> ReplayRun:
    """A replay of an experiment, with everything that was simulated.

    Example: ``br.replay("7b-train").ttft_us``
    """
    return _replayed(name, coefficients, replay, store)


def validate(
    name: str,
    coefficients: str | None = None,
    replay: str = "exact",
    *,
    simulator: Simulator | str | None = None,
    store: _StorePath = None,
) -> Answer:
    """How far the simulator is from the recorded server: errors, verdict and what it rests on.

    A row per metric and statistic, times in ms.  ``simulator``: another one than the embedded engine, with its own
    release, or its name as for ``--simulator``.  Raises ``NothingToJudgeError`` for a recording without latencies.

    Example: ``br.validate("7b-train").frame``
    """
    if isinstance(simulator, str):
        simulator = simulator_named(simulator, SimulatorInputs(release_for(coefficients, [name]), _store(store)))
    release = release_for(coefficients, [name]) if simulator is None else simulator.release
    release.refuse_if_invalid()
    mode = parse_mode(replay)
    with open_for_reading(_store(store)) as opened:
        slug = find_experiment(opened, name)
        comparison = compare_experiment(opened, slug, release, mode, simulator=simulator)
    return dataclasses.replace(comparison_answer(comparison), card=card(comparison))


def requests(
    name: str, coefficients: str | None = None, replay: str = "exact", store: _StorePath = None
) -> pl.DataFrame:
    """The recorded requests, with ``simulated_ttft_us`` and ``simulated_e2e_us`` (null where it did not finish).

    Example: ``br.requests("7b-train").select("ttft_us", "simulated_ttft_us")``
    """
    run = _replayed(name, coefficients, replay, store)
    done = pl.Series(run.simulated.completed)
    simulated = {"simulated_ttft_us": run.ttft_us, "simulated_e2e_us": run.e2e_us}
    return run.recording.requests.frame().with_columns(
        pl.when(done).then(pl.Series(values)).alias(column) for column, values in simulated.items()
    )


def steps(name: str, coefficients: str | None = None, replay: str = "exact", store: _StorePath = None) -> pl.DataFrame:
    """The simulated steps: start, end, batch, queue and KV use.

    Example: ``br.steps("7b-train").head()``
    """
    steps = _replayed(name, coefficients, replay, store).result.steps
    columns = {column: step_column(steps, column) for column in steps.dtype.names or ()}
    return pl.DataFrame({"step": range(len(steps)), **columns})


def segments(
    name: str, coefficients: str | None = None, replay: str = "exact", store: _StorePath = None
) -> pl.DataFrame:
    """A row per request and segment of its time, ``observed_us``, ``simulated_us`` and their difference.

    Example: ``br.segments("mine", coefficients="mine.yaml")``
    """
    return segment_frame(segments_of(_replayed(name, coefficients, replay, store)))


def timeline_window(
    name: str,
    from_us: int = 0,
    until_us: int | None = None,
    coefficients: str | None = None,
    replay: str = "exact",
    store: _StorePath = None,
) -> Timeline:
    """A window of the recording and its replay: ``.lanes``, ``.steps``, ``.counters`` are frames.

    Example: ``br.timeline_window("7b-train", 0, 5_000_000).lanes``
    """
    return timeline(_replayed(name, coefficients, replay, store), from_us, until_us)


def explain(name: str, coefficients: str | None = None, replay: str = "exact", store: _StorePath = None) -> Answer:
    """Where the error comes from: a row per part of the error of each mean and p99.

    ``part``: ``error``, each component, and ``unexplained``; ``share_us``: of a component its Shapley value with
    bounds of 95 %.

    Example: ``br.explain("34b-general", replay="scheduling=synchronous").frame``
    """
    release = release_for(coefficients, [name])
    mode = parse_mode(replay)
    with open_for_reading(_store(store)) as opened:
        recording = read_stored(opened, find_experiment(opened, name))
        gaps = pooled_gaps(opened, recording.slug, observed_requests(recording))
        judged = compare_experiment(opened, recording.slug, release, mode)
    again = given_options(coefficients, _store(store))
    found = attribute(
        recording,
        release,
        mode,
        token_gaps=gaps,
        errors=judged.estimates,
        options=again,
    )
    answer = below_verdict(attribution_answer(found), judged)
    return dataclasses.replace(answer, card=f"{card(judged)}<pre>{escape(str(answer))}</pre>")


def compare(
    a: str, b: str, *, experiment: str | None = None, coefficients: str | None = None, store: _StorePath = None
) -> Answer:
    """Two sides beside each other, named as for ``blis-replay compare``; a row per metric and statistic.

    A side is an experiment, ``EXPERIMENT@RELEASE``, or a release or simulator with
    ``experiment``.  ``coefficients``: of a side that is a simulator.

    Example: ``br.compare("7b-train", "7b-train@h100-vllm-0.15.1").frame``
    """
    choice = Choice(experiment, coefficients)
    with open_for_reading(_store(store)) as opened:
        return differences_answer(differences(side_of(opened, a, choice), side_of(opened, b, choice)))


def simulate(
    name: str, changes: Mapping[str, EngineValue], coefficients: str | None = None, store: _StorePath = None
) -> Answer:
    """The same requests with other engine arguments, such as ``{"max_num_seqs": 64}``; a row per replay.

    Example: ``br.simulate("7b-train", {"max_num_seqs": 64}).frame``
    """
    release = release_for(coefficients, [name])
    with open_for_reading(_store(store)) as opened:
        recording = read_stored(opened, find_experiment(opened, name))
        judged = judged_as_recorded(opened, recording.slug, release)
    found = what_if(recording, release, [tuple(changes.items())])
    return whatif_answer(found, given_options(coefficients, _store(store)), judged)


def calibrate(
    *names: str, out: Path | str, prior: str | None = None, force: bool = False, store: _StorePath = None
) -> Answer:
    """Fit step times and delays to recordings and write a release to ``out``; a row per coefficient.

    ``names``: slugs, aliases or patterns; ``prior``: a release whose values stand for what cannot be determined.
    ``force``: write also a fit that misses its own training data, and over another file.

    Example: ``br.calibrate("mine", out="mine.yaml").frame``
    """
    if not names:
        raise TypeError("name what to fit to")
    with open_for_reading(_store(store)) as opened:
        recordings, left_out = training_recordings(opened, names)
        to_judge = judged_next(opened, recordings), given_options(str(out), _store(store))
    name, options = Path(out).stem, Options(load_release(prior or DEFAULT_PRIOR))
    file = calibrate_to(Path(out), name, recordings, lambda: calibrated(recordings, name, options), force=force)
    return calibration_answer(file, recordings, to_judge, left_out)


def gate(
    coefficients: str,
    *names: str,
    baseline: str | None = None,
    policy: Path | str | None = None,
    store: _StorePath = None,
) -> Answer:
    """May a release be used? Its errors against a policy and another release; a row per check.

    ``names``: experiments, all of the release's models without any; ``policy``: a YAML file.

    Example: ``br.gate("h100-vllm-0.15.1", "7b-train").frame``
    """
    rules = load_policy(None if policy is None else Path(policy))
    before = load_release(baseline) if baseline else None
    with open_for_reading(_store(store)) as opened:
        return gate_answer(gated(opened, load_release(coefficients), before, rules, names))


def report(
    *names: str,
    coefficients: str | None = None,
    baseline: str | None = None,
    replay: str = "exact",
    out: Path | str | None = None,
    store: _StorePath = None,
) -> Report:
    """The page of these experiments, of all without a name: ``.html``, ``.verdicts``, ``.not_judged``.

    ``baseline``: another release, whose errors stand below.  ``out``: a file to write the page to.

    Example: ``br.report("34b-general", out="report.html").verdicts``
    """
    path, release = _store(store), release_for(coefficients)
    with open_for_reading(path) as opened:
        slugs = [find_experiment(opened, name) for name in dict.fromkeys(names)] or all_experiments(opened)
    before = load_release(baseline) if baseline else None
    mode = parse_mode(replay)
    made = reported(path, slugs, release, mode, baseline=before, ships=coefficients is None)
    if out is not None:
        write_whole(out, made.html)
    return made


def _replayed(name: str, coefficients: str | None, mode: str, store: _StorePath) -> ReplayRun:
    release = release_for(coefficients, [name])
    return driver.replay(load(name, store), release, parse_mode(mode))


def _store(store: _StorePath) -> Path:
    return Path(store or os.environ.get("BLIS_REPLAY_STORE") or STORE_DEFAULT)
