"""The functions of ``validate.api`` say what the command line says."""

from __future__ import annotations

import shlex
import subprocess
import sys
from inspect import getdoc
from pathlib import Path

import polars as pl
import pytest
from docs_generated import example_of, public_api

from blis_replay.base.errors import FileExistsAlreadyError, UnknownExperimentError
from blis_replay.replay.release_file import load_release
from blis_replay.validate import api as br
from blis_replay.validate.experiment import DEFAULT_RELEASE, release_for
from blis_replay_labs.planted.files import write_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    truth = write_demo(folder)
    read = br.ingest(folder / truth.spec.slug, store=folder / "s.duckdb")
    assert read["alias"].to_list() == ["1b-general"]
    return folder / "s.duckdb"


def test_metrics_are_those_of_the_table(store: Path) -> None:
    """34b-general, published: TTFT 51.59 ms, E2E 4,092.50 ms."""
    answer = br.validate("34b-general", store=store)
    frame = answer.frame
    assert '<strong class="chip fits">FITS</strong> 34b-general' in (answer._repr_html_() or "")
    means = {row["metric"]: row for row in frame.filter(pl.col("statistic") == "mean").iter_rows(named=True)}
    assert means["ttft"]["observed_ms"] == pytest.approx(51.59, abs=0.005)
    assert means["e2e"]["observed_ms"] == pytest.approx(4_092.5, abs=0.005)
    assert means["e2e"]["error"] == pytest.approx(means["e2e"]["simulated_ms"] / means["e2e"]["observed_ms"] - 1)


def test_requests_and_steps_are_those_of_one_run(store: Path) -> None:
    """The first token of a request comes of its prefill, every other one of a decode; none is preempted."""
    requests, steps = br.requests("34b-codegen", store=store), br.steps("34b-codegen", store=store)
    run = br.replay("34b-codegen", store=store)
    assert requests["simulated_ttft_us"].to_list() == run.ttft_us.tolist()
    assert requests["simulated_e2e_us"].to_list() == run.e2e_us.tolist()
    assert steps["decode_tokens"].cast(pl.Int64).sum() == requests["output_tokens"].sum() - len(requests)


def test_parts_of_an_error_sum_to_it(store: Path) -> None:
    frame = br.explain("34b-general", replay="scheduling=synchronous", store=store).frame
    ttft = frame.filter((pl.col("metric") == "ttft") & (pl.col("statistic") == "mean"))
    shares = dict(ttft.select("part", "share_us").iter_rows())
    error_us = shares.pop("error")
    assert sum(shares.values()) == pytest.approx(error_us)
    assert max(shares, key=lambda part: abs(shares[part])) == "scheduling mode"


def test_the_environment_names_the_store_as_for_the_command_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLIS_REPLAY_STORE", str(store))
    assert br.load("1b-general").requests.height == 300
    with pytest.raises(UnknownExperimentError, match="did you mean 1b-general"):
        br.load("1b-generl")


def test_what_there_is_and_what_is_wrong_with_it(store: Path) -> None:
    """17 experiments ship and one was ingested; two stamps per token are the finding of all that were published."""
    assert br.list(store).frame.filter(pl.col("alias").is_in(["1b-general", "34b-general"]))["requests"].to_list() == [
        16_800,
        300,
    ]
    found = br.inspect("34b-general", store).frame.filter(pl.col("check") == "token_events")
    assert found["severity"].to_list() == ["corrected"]


def test_what_is_public_is_documented_and_nothing_else_is() -> None:
    """Each function has a docstring and a line in docs/json-and-python.md; a verb has its own name."""
    assert {"validate", "explain", "calibrate", "gate", "simulate", "compare", "report", "list"} <= public_api().keys()
    page = (Path(__file__).parents[2] / "docs" / "json-and-python.md").read_text("utf-8")
    for name, function in public_api().items():
        assert getdoc(function)
        assert f"| `br.{name}` |" in page


@pytest.mark.heavy
def test_each_function_has_an_example_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader types them, in an empty folder: a recording of one's own first, and coefficients of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLIS_REPLAY_STORE", raising=False)
    truth = write_demo(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / truth.spec.slug).rename("runs/mine")
    examples = {name: example_of(function) for name, function in public_api().items()}
    assert [name for name, example in examples.items() if f"br.{name}(" not in example] == []
    answers = {
        name: eval(examples[name], {"br": br})  # noqa: S307 (our own docstrings)
        for name in dict.fromkeys(("ingest", "calibrate", *examples))
    }
    frames = {name: answer for name, answer in answers.items() if isinstance(answer, pl.DataFrame)}
    assert set(answers) - set(frames) == {"replay", "report"}
    assert [name for name, frame in frames.items() if frame.is_empty()] == []
    for name in ("explain", "compare", "gate", "validate", "simulate"):  # numbers, not texts of them
        assert {kind.base_type() for kind in frames[name].dtypes} & {pl.Float64}


def test_calibrate_does_not_write_over_another_file(tmp_path: Path, store: Path) -> None:
    """As the command line: refused before the fit, written with ``force``."""
    (tmp_path / "notes.yaml").write_text("mine: true\n", "utf-8")
    with pytest.raises(FileExistsAlreadyError):
        br.calibrate("tiny-live-c", out=tmp_path / "notes.yaml", store=store)
    assert (tmp_path / "notes.yaml").read_text("utf-8") == "mine: true\n"
    br.calibrate("tiny-live-c", out=tmp_path / "notes.yaml", force=True, store=store)
    assert load_release(str(tmp_path / "notes.yaml")).models[0].model == "tiny"


def test_without_a_release_the_one_that_ships_for_the_experiments_is_used() -> None:
    """The recordings of a CPU server are of a model that the coefficients of the H100 runs do not have."""
    assert release_for(None, ["tiny-live-b"]).name == "cpu-vllm-0.32.0"
    assert release_for(None, ["tiny-live-*"]).name == "cpu-vllm-0.32.0"
    for names in ([], ["7b-train"], ["tiny-live-b", "34b-general"], ["of-my-own"]):
        assert release_for(None, names).name == DEFAULT_RELEASE
    assert release_for("h100-physical", ["tiny-live-b"]).name == "h100-physical"


def test_other_engine_arguments_and_two_sides_answer_alike(store: Path) -> None:
    """Half as many sequences as 34b-codegen had at once slow it down; a recording differs from its replay."""
    answer = br.simulate("34b-codegen", {"max_num_seqs": 16}, store=store)
    recorded, changed = answer.frame.select("overrides", "e2e_mean_ms").rows()
    assert changed[0] == "max_num_seqs=16"
    assert changed[1] > recorded[1]
    assert "max_num_seqs=16" in str(answer)
    # As the command line says it, so it can be typed.
    assert f"blis-replay validate 34b-codegen --store {shlex.quote(str(store))}" in " ".join(str(answer).split())
    sides = br.compare("34b-codegen", "34b-codegen@h100-vllm-0.15.1", store=store)
    assert sides.frame.height == 16


def test_three_lines_do_in_a_fresh_interpreter(tmp_path: Path) -> None:
    lines = (
        "from blis_replay.validate import api as br\n"
        "frame = br.validate('34b-codegen', store='s.duckdb').frame\n"
        "print(frame.filter(frame['metric'] == 'e2e').height)"
    )
    ended = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "4\n", "")
