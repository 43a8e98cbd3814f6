"""The same as the command line, from Python: functions that return polars frames and pictures.

::

    from blis_replay.validate import notebook as br
    br.metrics("34b-general")                                     # observed, simulated, error
    br.attribution("34b-general", replay="scheduling=synchronous")  # and what the error comes from
    br.figure("34b-general", "ttft")                              # a picture of the report, by itself

``name`` is a slug or alias of an experiment, stored or bundled; ``coefficients`` a release that ships or a YAML file,
``replay`` a mode as ``validate --replay`` takes it.  ``store`` is the file of the ground-truth store, by default the
one of the command line.  Times are us.  Errors are those of the command line, one line each: ``IngestError``,
``ReplayError``, ``SimulatorError``, ``ValidateError``.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from blis_replay.fixtures.catalogue import profile_of
from blis_replay.ingest.ingest import ingest_source, outcomes_frame
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import inter_token_gaps, open_store, read_stored
from blis_replay.ingest.store_place import STORE_DEFAULT
from blis_replay.replay import driver
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.store import step_table
from blis_replay.validate.attribution.attribute import attribute
from blis_replay.validate.attribution.attribution_frame import attribution_frame
from blis_replay.validate.attribution.segments import segment_frame, segments_of
from blis_replay.validate.experiment import (
    DEFAULT_RELEASE,
    all_experiments,
    compare_whole,
    errors_frame,
    find_experiment,
    read_experiment,
    stored_experiment,
)
from blis_replay.validate.experiment_list import experiment_list, experiments_frame
from blis_replay.validate.inspection import findings_frame
from blis_replay.validate.observed import observed_requests
from blis_replay.validate.report.evidence import gather
from blis_replay.validate.report.picture import Picture, picture
from blis_replay.validate.report.report import Report
from blis_replay.validate.report.report import report as make_report
from blis_replay.validate.timeline.window import Timeline
from blis_replay.validate.timeline.window import timeline as window_of

StorePath = Path | str | None


def ingest(*paths: Path | str, engine: Path | str | None = None, store: StorePath = None) -> pl.DataFrame:
    """Read experiments into the store; a row each: slug, alias, outcome, and how much was read.

    ``paths``: directories, files and patterns, as ``blis-replay ingest`` takes them; ``engine``: a YAML file of engine
    arguments.  Raises ``RecordingError`` for the first that cannot be read.
    """
    outcomes = [
        ingest_source(
            _store(store), source, profile=profile_of(source.slug), engine_file=Path(engine) if engine else None
        )
        for source in sources_of([str(path) for path in paths])
    ]
    return outcomes_frame(outcomes)


def experiments(store: StorePath = None) -> pl.DataFrame:
    """A row an experiment, stored or bundled."""
    return experiments_frame(experiment_list(_store(store)))


def recording(name: str, store: StorePath = None) -> Recording:
    """The recording itself; ``.requests`` and ``.aggregates`` are frames, ``.steps.whole()`` and others too."""
    return stored_experiment(_store(store), name)


def replay(name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None) -> ReplayRun:
    """A replay of an experiment, with everything that was simulated."""
    return _replayed(stored_experiment(_store(store), name), coefficients, replay)


def metrics(
    name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> pl.DataFrame:
    """``metric, statistic, observed_us, simulated_us, error``, and the ``reason`` where a number is missing."""
    with open_store(_store(store)) as opened:
        experiment = read_experiment(opened, find_experiment(opened, name))
    return errors_frame(compare_whole(experiment, _replayed(experiment.recording, coefficients, replay)))


def requests(
    name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> pl.DataFrame:
    """The recorded requests, with ``simulated_ttft_us`` and ``simulated_e2e_us`` (null where it did not finish)."""
    experiment = stored_experiment(_store(store), name)
    run = _replayed(experiment, coefficients, replay)
    done = pl.Series(run.simulated.completed)
    simulated = {"simulated_ttft_us": run.ttft_us, "simulated_e2e_us": run.e2e_us}
    return experiment.requests.with_columns(
        pl.when(done).then(pl.Series(values)).alias(column) for column, values in simulated.items()
    )


def steps(
    name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> pl.DataFrame:
    """The simulated steps: start, end, batch, queue and KV use."""
    return step_table(_replayed(stored_experiment(_store(store), name), coefficients, replay).result)


def segments(
    name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> pl.DataFrame:
    """A row a request and segment of its way, ``observed_us``, ``simulated_us`` and their difference."""
    return segment_frame(segments_of(_replayed(stored_experiment(_store(store), name), coefficients, replay)))


def timeline(
    name: str,
    from_us: int = 0,
    until_us: int | None = None,
    coefficients: str = DEFAULT_RELEASE,
    replay: str = "exact",
    store: StorePath = None,
) -> Timeline:
    """A window of the recording and its replay: ``.lanes``, ``.steps``, ``.counters`` are frames."""
    return window_of(_replayed(stored_experiment(_store(store), name), coefficients, replay), from_us, until_us)


def attribution(
    name: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> pl.DataFrame:
    """Where each error comes from: ``metric, statistic, part, share_us, low_us, high_us, change_us``.

    ``part``: ``error``, each component, and ``no component``; ``share_us``: of a component its Shapley value with
    bounds of 95 %; ``change_us``: what it changes one after the other in this order.
    """
    release = load_release(coefficients)
    with open_store(_store(store)) as opened:
        experiment = read_stored(opened, find_experiment(opened, name))
        gaps = inter_token_gaps(opened, experiment.slug, observed_requests(experiment))
    found = attribute(
        experiment,
        release,
        parse_mode(replay, release.published_replay),
        reference=load_release(DEFAULT_RELEASE),
        token_gaps=gaps if len(gaps[0]) else None,
    )
    return attribution_frame(found)


def findings(name: str, store: StorePath = None) -> pl.DataFrame:
    """What the instrument checks found: ``check, severity, metric, message, threshold``."""
    return findings_frame(stored_experiment(_store(store), name).findings)


def figure(
    name: str, what: str, coefficients: str = DEFAULT_RELEASE, replay: str = "exact", store: StorePath = None
) -> Picture:
    """One picture of the report, which a notebook shows; ``.numbers`` is what it draws, a polars frame.

    ``what``: ``e2e``, ``ttft`` or ``itl`` (distributions), ``ttft by prompt``, ``ttft by queue``, ``steps``,
    ``errors`` (over time), ``depth`` or ``attribution``.  Raises ``ValidateError`` for another word, and with the
    reason where the recording has no numbers for it.
    """
    path, release = _store(store), load_release(coefficients)
    with open_store(path) as opened:
        slug, mode = find_experiment(opened, name), parse_mode(replay, release.published_replay)
        return picture(gather(opened, slug, release, mode, load_release(DEFAULT_RELEASE)), what)


def report(
    *names: str,
    coefficients: str = DEFAULT_RELEASE,
    baseline: str | None = None,
    replay: str = "exact",
    out: Path | str | None = None,
    store: StorePath = None,
) -> Report:
    """The page of these experiments, of all without a name: ``.html``, ``.verdicts``, ``.not_judged``.

    ``baseline``: another release, whose errors stand below.  ``out``: a file to write the page to.
    """
    path, release = _store(store), load_release(coefficients)
    with open_store(path) as opened:
        slugs = [find_experiment(opened, name) for name in dict.fromkeys(names)] or all_experiments(opened)
    before = load_release(baseline) if baseline else None
    made = make_report(path, slugs, release, parse_mode(replay, release.published_replay), baseline=before)
    if out is not None:
        Path(out).write_text(made.html, "utf-8")
    return made


def _replayed(experiment: Recording, coefficients: str, replay: str) -> ReplayRun:
    release = load_release(coefficients)
    return driver.replay(experiment, release, parse_mode(replay, release.published_replay))


def _store(store: StorePath) -> Path:
    return Path(store or os.environ.get("BLIS_REPLAY_STORE") or STORE_DEFAULT)
