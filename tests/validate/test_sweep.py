"""Levels of one server as one experiment: curves, the knee, one verdict and the level that decides it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from blis_runs import release_of
from command_line import Run
from load_levels import DELAY, SERVER, level, measured

from blis_replay.blis.releases.release import format_release
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison.pages import validation_answer
from blis_replay.validate.comparison.sweep import Sweep, sweeps_of
from blis_replay.validate.comparison.validated import Validated, validate_many
from blis_replay.validate.report.sweep_chart import sweep_chart
from blis_replay.validate.text.answer import page_text

pytestmark = pytest.mark.slow

CLIENTS = (1, 4, 16)
LEVELS = [measured(clients, 200, 60) for clients in CLIENTS]


def validated(tmp_path: Path, levels: list[Recording]) -> Validated:
    """Replayed with the server's own coefficients."""
    with open_store(tmp_path / "store.duckdb") as store:
        for recording in levels:
            ingest_recording(store, recording)
    simulator = EmbeddedEngine(release_of(SERVER, DELAY))
    return validate_many(
        tmp_path / "store.duckdb", [one.slug for one in levels], ReplayMode(), (0.0, 1.0), simulator, workers=1
    )


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Validated:
    return validated(tmp_path_factory.mktemp("exact"), LEVELS)


def test_levels_of_one_server_are_one_sweep(exact: Validated) -> None:
    """The server is that of the coefficients, and ten requests a client decide nothing: widest interval, 16 clients."""
    (sweep,) = sweeps_of(exact.comparisons)
    assert (sweep.by, sweep.loads, sweep.verdict) == ("clients", (1.0, 4.0, 16.0), "UNDECIDED")
    assert [one.metrics["e2e"]["mean"].error for one in sweep.levels] == pytest.approx([0, 0, 0], abs=1e-3)
    reach = [largest.reach if (largest := one.judgement.largest) else 0.0 for one in sweep.levels]
    assert sweep.decides == reach.index(max(reach)) == 2


def test_throughput_is_clients_over_the_mean_e2e(exact: Validated) -> None:
    (sweep,) = sweeps_of(exact.comparisons)
    e2e = sweep.levels[2].metrics["e2e"]["mean"]
    assert sweep.throughput(2) == pytest.approx((16 / (e2e.a_us or 0) * 1e6, 16 / (e2e.b_us or 0) * 1e6))


@pytest.mark.parametrize(("at_16", "knee"), [(1.9, None), (2.1, 4.0)])
def test_the_knee_is_where_e2e_grows_faster_than_the_root_of_the_load(
    exact: Validated, at_16: float, knee: float | None
) -> None:
    """From 4 to 16 clients the root of the load doubles."""
    (sweep,) = sweeps_of(exact.comparisons)
    four, most = sweep.levels[1].metrics["e2e"]["mean"], sweep.levels[2]
    slow = {**most.metrics["e2e"], "mean": replace(four, a_us=(four.a_us or 0) * at_16)}
    changed = replace(most, metrics={**most.metrics, "e2e": slow})
    assert Sweep("clients", sweep.loads, (*sweep.levels[:2], changed)).knees["observed"] == knee


def test_one_level_that_is_off_decides(tmp_path: Path) -> None:
    """At 4 clients the server took 1.5 times as long as its coefficients say: -33 %, beyond any interval."""
    off = validated(tmp_path, [LEVELS[0], measured(4, 200, 60, 1.5), LEVELS[2]])
    (sweep,) = sweeps_of(off.comparisons)
    assert (sweep.verdict, sweep.loads[sweep.decides]) == ("FAIL", 4.0)
    answer = validation_answer(off, summary=True)
    (said,) = answer.document["sweeps"]
    assert (said["verdict"], said["decides"], answer.exit_code) == ("FAIL", "c4-200", 1)
    assert said["levels"][1]["e2e"]["error"] == pytest.approx(-1 / 3, abs=0.02)
    text = page_text(answer.page)
    assert "FAIL  3 levels by clients of some/Model: decided at 4 clients" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_report_draws_levels_evenly_with_the_interval_around_the_simulated_mean(exact: Validated) -> None:
    """1, 4 and 16 clients are as far apart; both knees of an exact simulator are one."""
    (sweep,) = sweeps_of(exact.comparisons)
    chart = sweep_chart(sweep)
    assert len(chart.numbers.rows) == 3
    one, four, most = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]* class="tick">', chart.svg)]
    assert (four - one, one < four) == (pytest.approx(most - four, abs=0.1), True)
    assert ("knee of both" in chart.svg) == (sweep.knees["observed"] is not None)
    bands = re.findall(r'd="M ([^"]+) Z" style="fill: var\(--simulated\)', chart.svg)
    # Ten requests of one client tell no interval.
    assert [len(band.split(" L ")) for band in bands] == [4, 4]


def test_several_experiments_are_explained_at_the_level_that_decides(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    validated(tmp_path, [LEVELS[0], measured(4, 200, 60, 1.5)])
    (tmp_path / "mine.yaml").write_text(format_release(release_of(SERVER, DELAY)), "utf-8")
    given = ("--coefficients", "mine.yaml", "--store", store, "--jobs", "1", "--json")
    document = run("explain", "c1-200", "c4-200", *given).json
    assert document["experiment"] == document["sweep"]["decides"] == "c4-200"
    assert document["sweep"]["verdict"] == "FAIL"


def test_what_does_not_belong_together(exact: Validated) -> None:
    """Other lengths, another GPU, unstated lengths of another workload, and one load only are no sweep."""
    one, four, most = exact.comparisons
    longer = replace(four, recording=replace(level(4, 400, 60, {}), engine=four.recording.engine))
    other = replace(most, recording=replace(most.recording, hardware="H200-SXM"))
    assert sweeps_of([one, longer, other]) == []
    assert sweeps_of([one, one]) == []
    near = one.recording.aggregates.with_columns(
        pl.when(pl.col("metric") == "concurrency").then(1.05).otherwise("value")
    )
    assert sweeps_of([one, replace(one, recording=replace(one.recording, aggregates=near))]) == [], "one load, twice"
    stated = four.recording.aggregates.filter(pl.col("metric") == "concurrency")
    chat, code = (
        replace(level, recording=replace(level.recording, aggregates=rows, workload=name))
        for level, rows, name in (
            (one, one.recording.aggregates.filter(pl.col("metric") == "concurrency"), "chat"),
            (four, stated, "code"),
        )
    )
    assert sweeps_of([chat, code]) == []
    assert len(sweeps_of([chat, replace(code, recording=replace(code.recording, workload="chat"))])) == 1
