"""Whether a recording is held out: whether coefficients were fitted on it, on a part of it, or on neither."""

from __future__ import annotations

import json
from importlib import resources

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import PUBLISHED, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.judgement import FITTED, Use

# Shares of a recording's keys: fewer are chance (at most 4 in 1,000 between any two of 19 recordings), more are all.
_SOME, _ALL = 0.01, 0.9


def use_of_run(run: ReplayRun) -> Use:
    """What the coefficients of a replay were fitted on, as far as its recording, of a pair either one, is concerned.

    A program that was named as a command says it itself, or nobody knows.
    """
    if not run.simulator.startswith(("cmd:", "zip:")):
        use, apart = use_of(run.release, run.recording), run.plan.apart
        if apart is None or use in FITTED:
            return use
        return "fitted on part of this run" if apart.fitted or use_of(run.release, apart.prefill) in FITTED else use
    stated = run.simulated.fitted_on
    if not stated:
        return "unknown" if stated is None else "fitted on no recording"
    from blis_replay.ingest.identity import requests_hash

    own = {run.recording.slug, run.recording.alias, run.recording.content_hash, requests_hash(run.recording)}
    return "fitted on this run" if own & {*stated} else "held out"


def use_of(release: CoefficientRelease, recording: Recording) -> Use:
    """The same of a release: by the recording's name, by its content, by single requests, and by its run.

    Files of one run from two sides (a client's, the server's log, its counters) share no latency.
    """
    if not release.fitted_on:
        return "unknown" if release.fitted_on is None else "fitted on no recording"
    if release.used(recording.slug, recording.content_hash):
        return "fitted on this run"
    from blis_replay.ingest.identity import request_keys, requests_hash, shared_with  # most releases name the run

    if release.used("", requests_hash=requests_hash(recording)):
        return "fitted on this run"
    from blis_replay.validate.run_mark import run_mark, same_run

    own = run_mark(recording)
    another_side = any(fit.run is not None and same_run(fit.run, own) for fit in release.fitted_on)
    neither: Use = "fitted on another side of this run" if another_side else "held out"
    if recording.ground_truth == PUBLISHED:
        return neither  # its requests are reconstructed
    # Of the recordings that releases without sketches were fitted on.
    file = resources.files("blis_replay.validate.comparison") / "sketches.json"
    bundled: dict[str, str] = json.loads(file.read_text("utf-8"))
    sketches = {fit.sketch or bundled.get(fit.experiment, "") for fit in release.fitted_on} - {""}
    keys = request_keys(recording) if sketches else None
    share = 0.0 if keys is None else max(shared_with(sketch, keys) for sketch in sketches)
    return neither if share < _SOME else "fitted on this run" if share > _ALL else "fitted on part of this run"
