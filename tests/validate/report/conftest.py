"""Recordings whose truth is known, on pages."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest
from planted import planted_recording, wrong_release
from planted_pages import HOSTILE, HOSTILE_PLACES, PlantedPage

from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import (
    JOURNEY_EVENT_SCHEMA,
    LIFECYCLE_SCHEMA,
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    Setting,
    SourceFile,
)
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.report.evidence import Evidence, gather
from blis_replay.validate.report.report import Report, report
from blis_replay_labs.planted.causes import PRE_QUEUE, delay


@pytest.fixture(scope="session")
def planted_page(tmp_path_factory: pytest.TempPathFactory) -> PlantedPage:
    """The recording planted with every token time, ingested."""
    folder = tmp_path_factory.mktemp("report")
    planted = planted_recording(seed=3, token_file=folder / "tokens")
    with open_store(folder / "store.duckdb") as store:
        ingest_recording(store, planted.recording)
        find_experiment(store, "34b-roleplay")  # which brings it in
    wrong = wrong_release(planted, delay(PRE_QUEUE, pre_queue_us=30_000))
    return PlantedPage(store.path, planted.recording, planted.release, wrong)


@pytest.fixture(scope="session")
def wrong_evidence(planted_page: PlantedPage) -> Evidence:
    """What there is to say of the planted recording replayed with the wrong release."""
    with open_store(planted_page.store, read_only=True) as store:
        return gather(store, planted_page.recording.slug, planted_page.wrong, ReplayMode())


@pytest.fixture(scope="session")
def planted_report(planted_page: PlantedPage) -> Report:
    """The page of it, and of a bundled experiment of which only aggregates are known."""
    return report(planted_page.store, planted_page.slugs, planted_page.both, command="blis-replay report")


@pytest.fixture(scope="session")
def hostile_html(planted_page: PlantedPage, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a recording and a release in which every text is an attack, and some have a million characters."""
    bad = {place: f"{place}-{HOSTILE}" for place in HOSTILE_PLACES}
    long = "long" * 250_000
    recording = replace(
        planted_page.recording,
        slug=bad["slug"],
        alias=bad["alias"],
        model=bad["model"],
        hardware=bad["hardware"],
        token_events=None,
        files=(SourceFile(bad["file"], bad["kind"], 1, "0" * 64), SourceFile(long, "x", 1, "0" * 64)),
        missing=(HOSTILE,),
        engine=planted_page.recording.engine | {bad["argument"]: Setting(bad["value"], "recorded", bad["detail"])},
        stages=tuple(replace(stage, rate_per_s=1e300) for stage in planted_page.recording.stages),
    )
    entry = planted_page.wrong.models[0]
    entry = replace(entry, model=bad["model"], lifecycle=replace(entry.lifecycle, pre_queue_source=bad["delay"]))
    release = replace(planted_page.wrong, name=bad["release"], sha256=HOSTILE, models=(entry,))
    path = tmp_path_factory.mktemp("hostile") / "store.duckdb"
    with open_store(path) as store:
        ingest_recording(store, recording)
        measured = json.dumps({HOSTILE: HOSTILE, "huge": 1e308, long: long})
        store.connection.execute(
            "UPDATE findings SET message = ?, measured = ?, threshold = ?, metric = ?",
            [bad["message"], measured, HOSTILE, HOSTILE],
        )
    return report(path, [recording.slug], release, command=bad["command"], baseline=planted_page.true).html


@pytest.fixture(scope="session")
def bare_html(planted_page: PlantedPage, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a recording of which only arrivals, lengths and two latencies of each request are known."""
    recording = planted_page.recording
    kept = ("request_index", "arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us", "status")
    nothing = [pl.lit(None, kind).alias(name) for name, kind in REQUEST_SCHEMA.items() if name not in kept]
    bare = replace(
        recording,
        requests=rows_of(recording.requests.frame().with_columns(nothing)),
        steps=rows_of(pl.DataFrame(schema=STEP_SCHEMA)),
        lifecycles=rows_of(pl.DataFrame(schema=LIFECYCLE_SCHEMA)),
        journey_events=rows_of(pl.DataFrame(schema=JOURNEY_EVENT_SCHEMA)),
        token_events=None,
        prefix=None,
        hardware=None,
        stages=(),
    )
    path = tmp_path_factory.mktemp("bare") / "store.duckdb"
    with open_store(path) as store:
        ingest_recording(store, bare)
    return report(path, [bare.slug], planted_page.true).html
