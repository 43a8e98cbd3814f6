"""MLPerf runs: LoadGen's logs, its schedule, and predictions of runs whose latencies are known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blis_runs import release_of
from command_line import Run as CommandLine

from blis_replay.base.errors import RecordingError, ReplayError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import format_release
from blis_replay_labs.mlperf.loadgen import Run, each_run, read_runs, schedule_us
from blis_replay_labs.mlperf.prediction import (
    Case,
    Lengths,
    NotPredictedError,
    Submissions,
    fitted_factor,
    other_run,
    predicted,
    read_submissions,
    sites_of,
)
from blis_replay_labs.silicon.operators import DecodeAttention, OperatorModel, PrefillAttention, TokenTimes

SEED = 5489  # the default of std::mt19937
RUN = Run(
    {"path": "mine/server/log", "framework": "vLLM 0.10.0", "accelerator": "H100-SXM", "submitter": "us", "nodes": "1"},
    "server",
    10.0,
    40,
    10.0,
    SEED,
    None,
    {("tpot", "mean"): 10_000.0, ("ttft", "mean"): 10_000.0, ("e2e", "mean"): 50_000.0},
)
SUBMISSIONS = """
architectures:
  small: {layers: 2, hidden_size: 64, attention_heads: 4, kv_heads: 2, head_size: 16, intermediate_size: 128,
          vocabulary: 1000}
workloads:
  short: {source: made, prompt: {mean: 10, most: 10}, output: {mean: 5, most: 5}}
submissions:
  - path: mine/server/*
    source: made
    model: small
    workload: short
    replicas: 2
    release: RELEASE
    engine: {max_num_seqs: 8, max_num_batched_tokens: 64, max_model_len: 64, async_scheduling: false}
"""


@pytest.fixture
def submissions(tmp_path: Path) -> Path:
    """A file of one submission: two replicas of a server whose steps take 10 ms."""
    release = tmp_path / "ours.yaml"
    steps = LatencyModel("blackbox", 10_000_000, 0, 0)
    release.write_text(format_release(release_of(steps, Lifecycle(pre_queue_us=0.0), "org/small")))
    file = tmp_path / "submissions.yaml"
    file.write_text(SUBMISSIONS.replace("RELEASE", str(release)))
    return file


@pytest.fixture
def known(submissions: Path) -> Submissions:
    return read_submissions(submissions)


def detail_log(values: Mapping[str, object]) -> bytes:
    lines = [json.dumps({"key": key, "value": value, "time_ms": 0.1}) for key, value in values.items()]
    return "".join(f":::MLLOG {line}\n" for line in lines).encode()


LOG = {
    "effective_scenario": "Server",
    "effective_target_qps": 39.5,
    "effective_schedule_rng_seed": 18209322760996052031,
    "result_query_count": 26736,
    "result_scheduled_samples_per_sec": 39.6388,
    "result_completed_tokens_per_second": 5103.99,
    "result_mean_latency_ns": 3317798521,
    "result_99.00_percentile_latency_ns": 5050407029,
    "result_first_token_mean_latency_ns": 359333144,
    "result_time_to_output_token_mean": 23113051,
    "result_time_per_output_token_50.00_percentile_ns": 23644164,
}
# The same run as LoadGen sums it up; the shortest duration and the samples of the data set give the 26,736 queries.
SENT_S = (0.0, 0.4424, 1.2351, 16.0635, 36.3109)
SUMMARY = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Scheduled samples per second : 39.6388
Mean latency (ns)               : 3317798521
99.00 percentile latency (ns)   : 5050407029

Completed tokens per second                 : 5103.99
Mean First Token latency (ns)               : 359333144
Mean Time to Output Token (ns)               : 23113051
50.00 percentile time to output token (ns)   : 23644164
target_qps : 39.5
min_duration (ms): 600000
schedule_rng_seed : 18209322760996052031
performance_sample_count : 13368
"""


# -- Logs and tables ----------------------------------------------------------------------------


def test_a_detail_log_and_its_summary_are_the_same_run(tmp_path: Path) -> None:
    detail, summary = tmp_path / "detail.gz", tmp_path / "summary.txt"
    detail.write_bytes(gzip.compress(detail_log(LOG)))
    summary.write_text(SUMMARY)
    (run,), (summed,) = read_runs(detail), read_runs(summary)
    assert (run.scenario, run.rate_per_s, run.queries, run.schedule_seed) == (
        "server",
        39.5,
        26736,
        18209322760996052031,
    )
    assert run.audited_us == {
        ("e2e", "mean"): pytest.approx(3_317_798.521),
        ("e2e", "p99.00"): pytest.approx(5_050_407.029),
        ("ttft", "mean"): pytest.approx(359_333.144),
        ("tpot", "mean"): pytest.approx(23_113.051),
        ("tpot", "p50.00"): pytest.approx(23_644.164),
    }
    assert replace(summed, facts={}) == replace(run, facts={})


@pytest.mark.parametrize(("most", "queries"), [("60", 60), ("0", 80)])
def test_a_summary_of_loadgen_6(tmp_path: Path, most: str, queries: int) -> None:
    """Of our own run with 6.0.17: 60 queries of 40 samples; without a bound it would end with the second round."""
    summary = tmp_path / "summary.txt"
    lines = ("Time to Output", "Time per Output"), ("39.5\n", "1.5\n"), (": 600000", ": 1000"), (": 13368", ": 40")
    text = SUMMARY + f"min_query_count : 60\nmax_query_count : {most}\n"
    for of_5, of_6 in lines:
        text = text.replace(of_5, of_6)
    summary.write_text(text)
    (run,) = read_runs(summary)
    assert run.queries == queries
    assert run.audited_us["tpot", "mean"] == pytest.approx(23_113.051)


def test_a_schedule_of_loadgen_6_is_that_of_its_seed() -> None:
    """The first sends of our own run against vLLM, by the client's clock: a thread starts within 15 ms."""
    run = Run({}, "server", 1.5, 60, None, 1234567890123456789, None, {})
    assert schedule_us(run)[[0, 1, 2, 30, 59]] / 1e6 == pytest.approx(SENT_S, abs=0.015)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b":::MLLOG {\n", "line 1"),
        (detail_log(LOG | {"effective_target_qps": 0}), ""),
        (detail_log(LOG | {"effective_schedule_rng_seed": "x"}), ""),
        (detail_log(LOG | {"result_query_count": 1e9}), ""),
        (detail_log(LOG | {"result_mean_latency_ns": "long"}), ""),
        (detail_log({"loadgen_version": "5.1"}), ""),
        (b"scenario,target_qps,queries,schedule_seed\nserver,1,10,5\nserver,1,-3,5\n", "line 3"),
    ],
)
def test_what_cannot_be_rebuilt_is_one_line(tmp_path: Path, content: bytes, place: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(RecordingError) as refused:
        read_runs(path)
    assert (refused.value.place, "\n" in str(refused.value)) == (place, False)


@pytest.mark.parametrize("log", ["closed_RedHat*.detail.gz", "open_Krai*.detail.gz"])
def test_a_published_log_is_the_row_of_the_table(data_pack: Path, log: str) -> None:
    folder = data_pack / "mlperf"
    (run,) = read_runs(next(folder.glob(log)))
    same = [row for row in read_runs(folder / "v5.1.csv.gz") if row.audited_us == pytest.approx(run.audited_us)]
    assert [(row.rate_per_s, row.queries, row.schedule_seed) for row in same] == [
        (run.rate_per_s, run.queries, run.schedule_seed)
    ]


# -- Schedule ------------------------------------------------------------------------------------


def test_the_first_gap_is_that_of_the_published_generator() -> None:
    """std::mt19937 seeded by 5489 begins with 3499211612 and 581869302; the first query is sent at 0."""
    uniform = (3499211612 + 581869302 * 2**32) / 2**64
    gap_us = int(-np.log(1 - uniform) / 10 * 1e9) // 1_000
    assert schedule_us(RUN)[:2].tolist() == [0, gap_us]
    assert np.array_equal(schedule_us(replace(RUN, schedule_seed=SEED + 3 * 2**32)), schedule_us(RUN))


@pytest.mark.parametrize("table", ["v4.1.csv.gz", "v5.1.csv.gz"])
def test_the_schedule_has_the_published_rate(data_pack: Path, table: str) -> None:
    """All paced runs: queries after the first over the time of the last, to the six digits that are published."""
    paced = [run for run in read_runs(data_pack / "mlperf" / table) if run.scheduled_per_s]
    rates = [(run.queries - 1) / schedule_us(run)[-1] * 1e6 / (run.scheduled_per_s or 1) for run in paced]
    assert len(rates) >= 95
    assert rates == pytest.approx([1.0] * len(rates), abs=2e-5)


# -- Predictions ---------------------------------------------------------------------------------


def test_lengths_keep_their_mean_under_the_cut() -> None:
    drawn = Lengths(mean=295, spread=0.75, most=1024).drawn(20_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(295, rel=1e-3)
    assert drawn.min() >= 1
    assert drawn.max() == 1024
    assert set(Lengths(mean=129, most=129).drawn(3, np.random.default_rng(1)).tolist()) == {129}


def test_a_run_on_steps_of_10_ms(known: Submissions) -> None:
    """With two replicas and 5 requests a second on each, no request waits for more than a step that is under way."""
    simulated = Case(RUN, known).simulated_us()
    assert simulated["tpot", "mean"] == pytest.approx(10_000)
    assert 10_000 <= simulated["ttft", "mean"] < 20_000
    assert simulated["e2e", "mean"] == pytest.approx(simulated["ttft", "mean"] + 4 * 10_000)


@pytest.mark.parametrize(
    ("scenario", "facts", "reason"),
    [
        ("offline", {}, "offline: no arrivals, and no TTFT or TPOT"),
        (
            "server",
            {"framework": "vLLM 0.6.5.dev964+mlperf50"},
            "vLLM before 0.8: a scheduler that is not simulated (V0)",
        ),
        (
            "server",
            {"framework": "vLLM v0.9.2", "path": "elsewhere", "accelerator": "MI300X"},
            "no operator times of MI300X",
        ),
    ],
)
def test_why_a_run_is_not_predicted(
    known: Submissions, monkeypatch: pytest.MonkeyPatch, scenario: str, facts: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr("blis_replay_labs.silicon.tabulate.silicon_systems", lambda: ("h100_sxm",))
    with pytest.raises(NotPredictedError) as refused:
        Case(replace(RUN, scenario=scenario, facts={**RUN.facts, **facts}), known)
    assert str(refused.value) == reason


def test_operator_times_are_fitted_to_the_mean_tpot_of_another_run(known: Submissions) -> None:
    """Products of 10 ms at any batch: a server with 12 ms has the factor 1.2, and predicts another within 1 %."""
    cases = [
        Case(replace(RUN, facts={**RUN.facts, "path": f"mine/server/{name}"}, audited_us={("tpot", "mean"): us}), known)
        for name, us in (("a", 12_000.0), ("b", 12_060.0))
    ]
    nothing = (0.0, 0.0)
    model = OperatorModel(
        TokenTimes((1.0, 64.0), (10_000.0, 10_000.0), (10_000.0, 10_000.0), nothing),
        PrefillAttention((1.0, 64.0), (1.0, 64.0), (nothing, nothing)),
        DecodeAttention((1.0, 64.0), (1.0, 64.0), (nothing, nothing)),
    )
    for case in cases:
        case.entry = replace(case.entry, latency=model)
    assert other_run(cases[0], cases) is cases[1]
    assert fitted_factor(cases[0]) == pytest.approx(1.2, rel=5e-3)
    assert [one.error("tpot", "mean") for one in predicted(cases)] == pytest.approx([-1 / 6, -0.171], abs=1e-3)
    assert [one.error("tpot", "mean", fitted=True) for one in predicted(cases)] == pytest.approx([0, 0], abs=0.012)


def test_sites_are_those_with_the_same_machine_and_rate() -> None:
    """Rates within 2.5 % of the lowest, two submitters at least: 107 and 109, not 103; TTFT 10 and 10.2 ms are 2 %."""
    runs = [
        replace(
            RUN,
            rate_per_s=rate,
            facts={**RUN.facts, "submitter": name},
            audited_us={**RUN.audited_us, ("ttft", "mean"): ttft_us},
        )
        for name, rate, ttft_us in (("a", 107.0, 10_000.0), ("b", 109.0, 10_200.0), ("c", 103.0, 20_000.0))
    ]
    (sites,) = sites_of(runs)
    assert {run.facts["submitter"] for run in sites.runs} == {"a", "b"}
    assert sites.spread("ttft") == pytest.approx(0.02)


def test_a_submission_of_an_unknown_model_is_refused(submissions: Path) -> None:
    submissions.write_text(submissions.read_text().replace("model: small", "model: large"))
    with pytest.raises(ReplayError, match=r"field submissions\[0\].model: is none of small"):
        read_submissions(submissions)


@pytest.mark.slow
def test_from_the_table_to_the_page(run: CommandLine, tmp_path: Path, submissions: Path) -> None:
    """Two rows of one run, submitted under two names of its model, come once; offline is counted, not predicted."""
    table = tmp_path / "table.csv"
    head = (
        "path,framework,accelerator,nodes,scenario,target_qps,queries,scheduled_qps,schedule_seed,"
        "ttft_mean,tpot_mean,e2e_mean"
    )
    row = "mine/server/{},vLLM 0.10,H100-SXM,1,{},10,40,10,5489,12500000,10000000,52500000"
    rows = [row.format("a", "server"), row.format("b", "server"), row.format("c", "offline")]
    table.write_text("\n".join([head, *rows]) + "\n")
    assert len(list(each_run((table,)))) == 2
    answer = run("study", "mlperf", table, "--submissions", submissions, "--json").json
    assert (answer["predicted"], sum(answer["not_predicted"].values())) == (1, 1)
    tpot = next(row for row in answer["mean_abs_error"] if row["metric"] == "TPOT")
    assert tpot["mean"] == pytest.approx(0, abs=1e-6)
    assert "prompts all equal, mean 10" in run("study", "mlperf", table, "--submissions", submissions).out
