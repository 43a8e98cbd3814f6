"""``study generalize`` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Run
from json_docs import documented, fields_of
from small_model import CONFIG

from blis_replay.blis.latency.models import LatencyModel
from blis_replay_labs.planted.experiment import SyntheticExperiment
from blis_replay_labs.planted.files import write_experiment
from blis_replay_labs.planted.generate import generate

pytestmark = pytest.mark.slow


@pytest.fixture
def two_models(run: Run, tmp_path: Path) -> list[object]:
    """Recordings of two models in the store, and the options that say what they are."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    options: list[object] = ["--gpu", "H100-SXM", "--experiment", "1b-*", "--experiment", "2b-*"]
    for size, per_step_ns in (("1b", 4_000_000), ("2b", 6_000_000)):
        spec = replace(
            SyntheticExperiment(),
            slug=f"20260301-120000-made-{size}-tp1-general",
            model=f"org/made-{size}",
            latency=LatencyModel("blackbox", per_step_ns, 20_000, 30_000),
        )
        write_experiment(generate(spec), tmp_path / spec.slug)
        run("ingest", tmp_path / spec.slug)
        options += ["--config", f"org/made-{size}={config}"]
    return options


def test_each_model_is_left_out_and_a_release_of_each_fit_is_written(run: Run, two_models: list[object]) -> None:
    answer = run("study", "generalize", "--lomo", *two_models, "--out", "releases")
    assert answer.code == 0
    assert answer.err == ""
    assert {"1b-general", "2b-general"} <= {line.split(" ")[0] for line in answer.out.splitlines()}
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    assert sorted(path.name for path in Path("releases").iterdir()) == [
        "all.yaml",
        "without-made-1b.yaml",
        "without-made-2b.yaml",
    ]
    # What is written is what a fold was predicted with: the fold without 2b, on 2b itself.
    document = run("study", "generalize", "--lomo", *two_models, "--json").json
    fold = next(fold for fold in document["folds"] if fold["name"] == "made-2b")
    assert fold["trained_on"] == ["1b-general"]
    written = Path("releases") / "without-made-2b.yaml"
    checked = run("validate", "--experiment", "2b-general", "--coefficients", written, "--json").json["experiments"][0]
    assert checked["judgement"]["subject"]["use"] == "held out"
    predicted = fold["experiments"][0]["errors"]
    assert checked["metrics"]["e2e"]["mean"]["error"] == predicted["e2e"]["mean"]
    assert checked["metrics"]["ttft"]["p99"]["error"] == predicted["ttft"]["p99"]


def test_every_field_of_the_json_is_documented(run: Run, two_models: list[object]) -> None:
    document = run("study", "generalize", "--lomo", *two_models, "--json").json
    coefficients = document["in_distribution"]["coefficients"]
    fields = fields_of(document) - set(coefficients)
    assert fields - documented("study generalize") == set()
    assert {"folds", "in_distribution", "step_mape", "identified", "prior_source"} <= fields


def test_published_aggregates_alone_are_nothing_to_fit_to(run: Run) -> None:
    answer = run("study", "generalize", "--lomo", "--experiment", "34b-roleplay", "--experiment", "7b-roleplay")
    assert (answer.code, answer.out) == (4, "")
    assert "published aggregates are never fitted to" in answer.err
    assert len(answer.err.strip().splitlines()) == 1
