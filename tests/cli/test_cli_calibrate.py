"""``calibrate`` and ``steps``: what they print, and the documented form of their JSON."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from command_line import Run
from json_docs import documented, fields_of

from blis_replay.blis.releases.release import parse_release

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_the_command_after_a_fit_judges_another_recording_of_the_server(run: Run) -> None:
    """`tiny-live-*` are of one server; `--window` is that of the fit."""
    for name in ("tiny-live-a", "tiny-live-d"):
        assert run("inspect", name).code == 0
    fitted = run("calibrate", "tiny-live-a", "--window", "0.2:1", "--out", "mine.yaml")
    assert fitted.out.endswith("\n  blis-replay validate tiny-live-d --coefficients mine.yaml\n")
    with duckdb.connect(".blis-replay/store.duckdb") as store:  # what must not be used judges nothing
        store.execute("UPDATE findings SET severity = 'unusable' WHERE slug LIKE '%live-d' AND check_name = 'ledger'")
    assert run("list").out.splitlines()[-1] == "unusable: tiny-live-d"
    again = run("calibrate", "tiny-live-a", "--window", "0.2:1", "--out", "mine.yaml")
    assert again.out.rstrip().endswith("blis-replay validate tiny-live-a --coefficients mine.yaml --window 0.2:1")


@pytest.mark.usefixtures("stored_demo")
def test_a_fit_is_told_in_eighty_columns_and_kept_in_the_release(run: Run) -> None:
    """A table, why a coefficient is held, the scheduling mode, and the scores of each part of the split."""
    answer = run("calibrate", "--train", "1b-*", "--out", "mine.yaml")
    assert (answer.code, answer.err) == (0, "")
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    assert "coefficient" in answer.out
    assert "1b-general  test" in answer.out
    assert "\n  blis-replay validate 1b-general --coefficients mine.yaml" in answer.out
    fit = parse_release(Path("mine.yaml").read_text("utf-8"), "mine.yaml").models[0].fit
    assert fit is not None
    assert {score.part for score in fit.scores} == {"fit", "choose", "test"}


@pytest.mark.usefixtures("stored_demo")
def test_steps_are_told_in_eighty_columns(run: Run) -> None:
    fitted = run("calibrate", "--train", "1b-general", "--out", "mine.yaml", "--window", "0.1:1")
    assert fitted.out.endswith(" --coefficients mine.yaml --window 0.1:1\n"), "it is tried on what it was fitted to"
    answer = run("coefficients", "test", "--experiment", "1b-general", "--coefficients", "mine.yaml")
    assert (answer.code, answer.err) == (0, "")
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    assert "against the step cycle" in answer.out


@pytest.mark.parametrize("verb", ["calibrate", "coefficients test"])
@pytest.mark.usefixtures("stored_demo")
def test_every_field_of_the_json_is_documented_and_every_documented_field_exists(run: Run, verb: str) -> None:
    """Names in the first column are fields; other names in back quotes may be values."""
    fitted = run("calibrate", "--train", "1b-general", "--out", "mine.yaml", "--json").json
    stepped = run("coefficients", "test", "--experiment", "1b-general", "--coefficients", "mine.yaml", "--json").json
    fields = fields_of(fitted if verb == "calibrate" else stepped)
    assert sorted(fields - documented(verb)) == []
    assert sorted(documented(verb, first_column=True) - fields) == []


@pytest.mark.heavy
@pytest.mark.usefixtures("stored_demo")
def test_only_an_earlier_release_of_the_same_name_and_model_is_replaced(run: Run, made_fit: Path) -> None:
    refused = "error: mine.yaml: is there already; give --force to replace it, or another --out\n"
    calibrate = ("calibrate", "--train", "1b-general", "--out", "mine.yaml")
    release = made_fit.read_text("utf-8")
    for there in (
        "notes: mine\n",
        release.replace("name: mine", "name: old"),
        release.replace("synthetic-1b", "other"),
    ):
        Path("mine.yaml").write_text(there)
        answer = run(*calibrate)
        assert (answer.code, answer.out, answer.err) == (2, "", refused)
        assert Path("mine.yaml").read_text() == there
    assert run(*calibrate, "--force").code == 0
    assert "in place of" not in run(*calibrate).out, "the same fit again loses nothing"
    Path("mine.yaml").write_text(release.replace("summary: ", "summary: Once "))
    lost = parse_release(Path("mine.yaml").read_text("utf-8"), "mine.yaml").sha256
    assert run(*calibrate, "--json").json["replaced"] == lost


@pytest.mark.heavy
def test_a_fit_that_misses_its_own_data_is_written_with_force_only(
    run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fit meets its data to a hundredth of a per cent, which stands here for the 5 % of E2E that are allowed."""
    monkeypatch.setattr("blis_replay.validate.fit.scores.MOST_MISSED", {"e2e": 1e-6, "ttft": 1e-6})
    run("ingest", demo)
    refused = run("calibrate", "--train", "1b-general", "--out", "mine.yaml")
    assert refused.code == 1
    assert "misses its own training data: 1b-general (fit): mean" in " ".join(refused.out.split())
    assert "mine.yaml not written" in refused.out
    assert not Path("mine.yaml").exists()
    forced = run("calibrate", "--train", "1b-general", "--out", "mine.yaml", "--force")
    assert (forced.code, "wrote mine.yaml" in forced.out) == (0, True)
    assert parse_release(Path("mine.yaml").read_text("utf-8"), "mine.yaml").models
