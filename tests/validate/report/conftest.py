"""Recordings whose truth is known, on pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from planted_pages import HOSTILE, SCRIPT, PlantedPage

from blis_replay.fixtures.planted import planted_recording, with_wrong_pre_queue
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import Setting, SourceFile
from blis_replay.ingest.store import open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.experiment import DEFAULT_RELEASE, find_experiment
from blis_replay.validate.report.evidence import Evidence, gather
from blis_replay.validate.report.report import Report, report


@pytest.fixture(scope="session")
def planted_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedPage]:
    """The recording planted with every token time, ingested."""
    folder = tmp_path_factory.mktemp("report")
    planted = planted_recording(seed=3, token_file=folder / "tokens")
    with open_store(folder / "store.duckdb") as store:
        ingest_recording(store, planted.recording)
        wrong = with_wrong_pre_queue(planted.release, 30_000)
        yield PlantedPage(store, planted.recording, planted.release, wrong)


@pytest.fixture(scope="session")
def wrong_evidence(planted_page: PlantedPage) -> Evidence:
    """What there is to say of the planted recording replayed with the wrong release."""
    return gather(planted_page.store, planted_page.recording.slug, planted_page.wrong, ReplayMode(), planted_page.true)


@pytest.fixture(scope="session")
def planted_report(planted_page: PlantedPage) -> Report:
    """The page of it, and of a bundled experiment of which only aggregates are known."""
    bundled = find_experiment(planted_page.store, "34b-roleplay")
    models = (*planted_page.wrong.models, *load_release(DEFAULT_RELEASE).models)
    both = replace(planted_page.wrong, models=models)
    return report(planted_page.store, [bundled, planted_page.recording.slug], both, command="blis-replay report")


@pytest.fixture(scope="session")
def hostile_html(planted_page: PlantedPage, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a recording in which every text is an attack, and one has a million characters."""
    files = (SourceFile(HOSTILE, SCRIPT, 1, "0" * 64), SourceFile("long" * 250_000, "x", 1, "0" * 64))
    recording = replace(
        planted_page.recording,
        slug=f"slug-{HOSTILE}",
        alias=f"alias-{HOSTILE}",
        model=f"model-{HOSTILE}",
        hardware=f"hardware-{HOSTILE}",
        token_events=None,
        files=files,
        missing=(HOSTILE,),
        engine=planted_page.recording.engine | {HOSTILE: Setting(HOSTILE, "recorded", HOSTILE)},
    )
    entry = replace(planted_page.true.models[0], model=recording.model or "")
    release = replace(planted_page.true, name=f"release-{HOSTILE}", sha256=HOSTILE, models=(entry,))
    with open_store(tmp_path_factory.mktemp("hostile") / "store.duckdb") as store:
        ingest_recording(store, recording)
        return report(store, [recording.slug], release, command=f"blis-replay report {HOSTILE}").html
