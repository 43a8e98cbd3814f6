"""Whether a recording or its replay is overloaded, since when, and by what it is judged then."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest

from blis_replay.blis.latency.models import LatencyModel, Lifecycle, RegimeModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.overload import client_limits, growths, overloaded, queue
from blis_replay.ingest.readers.formats import request_formats
from blis_replay.ingest.recording import OVERLOAD_CHECK, Finding, Recording, SourceFile, Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import Store, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay, light
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.overview import mean_abs_errors
from blis_replay.validate.comparison.pages import comparison_answer, comparison_page
from blis_replay.validate.comparison.saturation import (
    Measure,
    Saturation,
    capacity,
    saturation,
)
from blis_replay.validate.comparison.verdict_text import command_text
from blis_replay.validate.experiment import DEFAULT_RELEASE, find_experiment
from blis_replay.validate.judgement import Command
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.text.answer import page_text
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.files import write_experiment
from blis_replay_labs.planted.generate import generate

# 8 places, 24 tokens at 8.5 ms per step, and asynchronous admission: about 37 requests a second at most.
ENGINE = EngineConfig(8, 2048, 4096, async_scheduling=True, num_gpu_blocks=10_001)
FILES = ("exp-config.yaml", "profile.yaml", "results/config.yaml", "trace.yaml", "trace.csv.gz")


def loaded(rate_per_s: float, seed: int = 1, **more: int) -> SyntheticExperiment:
    """15 requests a second for 20 s, then so many for 30 s, then 10 a second for 20 s."""
    rates = (Stage(0, 15.0, 20_000_000), Stage(1, rate_per_s, 30_000_000), Stage(2, 10.0, 20_000_000))
    return SyntheticExperiment(stages=rates, engine=ENGINE, seed=seed, **more)  # type: ignore[arg-type]


@lru_cache
def made(spec: SyntheticExperiment) -> tuple[SyntheticTruth, Recording]:
    truth = generate(spec)
    with TemporaryDirectory() as folder:
        write_experiment(truth, Path(folder) / spec.slug, files=FILES)
        with read_recording(Path(folder) / spec.slug) as recording:
            return truth, replace(recording, token_events=None)


def replayed(spec: SyntheticExperiment, slower: float = 1.0) -> ReplayRun:
    """The replay with the true coefficients, every step ``slower`` times as long."""
    true = spec.latency
    steps = (true.intercept_ns, true.per_prefill_token_ns, true.per_decode_token_ns)
    latency = LatencyModel("blackbox", *(int(ns * slower) for ns in steps))
    entry = ModelEntry(spec.model, 1, latency, spec.lifecycle)
    release = CoefficientRelease("ours", "valid", "s", "s", "H100", "0" * 64, (entry,), fitted_on=())
    return replay(made(spec)[1], release, ReplayMode(scheduling="asynchronous"))


def judged(spec: SyntheticExperiment, slower: float = 1.0) -> Saturation:
    found = saturation(replayed(spec, slower))
    assert found is not None
    return found


def measures(run: ReplayRun) -> dict[str, Measure]:
    return {measure.slug: measure for measure in capacity(run, saturation(run), 1_000, (None, None), ())}


def error_of(measure: Measure) -> float:
    assert measure.estimate is not None and measure.estimate.low <= measure.estimate.error <= measure.estimate.high
    return measure.estimate.error


def true_queue_s(truth: SyntheticTruth) -> tuple[float, float]:
    """From when to when the true waiting queue was never empty, the longest time of that kind."""
    steps = truth.result.steps
    edges = np.flatnonzero(np.diff(np.concatenate([[False], steps["waiting_depth"] > 0, [False]]).astype(np.int8)))
    at_s = np.append(steps["scheduled_us"], steps["end_us"][-1:])[edges].reshape(-1, 2) / 1e6
    first, last = at_s[np.argmax(at_s[:, 1] - at_s[:, 0])]
    return float(first), float(last)


@pytest.mark.parametrize(("rate_per_s", "seed"), [(45, 0), (45, 1), (45, 2), (60, 0), (60, 1), (60, 2)])
def test_the_onset_is_found_within_three_seconds_and_not_blamed_on_a_true_simulator(
    rate_per_s: float, seed: int
) -> None:
    """Overload begins with the second stage, at second 21 (its first second is a pause), or when that piles up."""
    spec = loaded(rate_per_s, seed)
    found, (from_s, _) = judged(spec), true_queue_s(made(spec)[0])
    assert found.from_us is not None
    assert 0 <= found.from_us / 1e6 - from_s < 3
    assert found.from_us == found.simulated.from_us
    of = measures(replayed(spec))
    assert error_of(of["tokens_per_s"]) == 0
    assert error_of(of["e2e_outside"]) == pytest.approx(0, abs=0.002)


def test_the_end_of_a_queue_is_found_too() -> None:
    spec = loaded(45)
    assert judged(spec).until_us == pytest.approx(true_queue_s(made(spec)[0])[1] * 1e6, abs=1_000_000)


def test_the_next_command_of_a_saturated_run_compares_what_came_before_the_queue() -> None:
    """Causes of latencies that measure a queue are those of the queue, so not `explain`."""
    comparison = overloaded_at(1.0)
    assert comparison.saturation is not None and comparison.saturation.from_us is not None
    assert comparison.before_the_queue is not None
    assert comparison.judgement.next == comparison.before_the_queue
    command, _, share = command_text(comparison.before_the_queue).partition(" --window 0:")
    assert command == f"blis-replay validate {comparison.alias}"
    last_us = int(comparison.recording.requests["arrival_us"].to_numpy()[-1])
    assert 0 <= comparison.saturation.from_us / last_us - float(share) < 0.01
    # That comparison is judged by the latencies of these requests, and does not advise itself again.
    selected = Selection(window=(0.0, float(share)))
    before = compare_replay(comparison.run, None, selected, queues=True)
    assert comparison.overloaded and not before.overloaded
    assert {q.key for q in before.judgement.judged} == {"e2e", "ttft", "itl"} and before.before_the_queue is None
    assert before.judgement.next == Command("validate", comparison.alias, f" --window 0:{share} -v")


def test_a_queue_that_stands_at_the_end_has_no_end() -> None:
    assert judged(loaded(60)).until_us is None


@pytest.mark.parametrize(
    ("rate_per_s", "slower", "throughput"),
    # A full batch serves in proportion to 1 / step; a server that is not full serves what comes:
    # at 45 a second the fast one is faster than needed, and serves the 1.2 asked for each one served.
    [(60, 0.8, 1 / 0.8 - 1), (60, 1.2, 1 / 1.2 - 1), (45, 1.2, 1 / 1.2 - 1), (45, 0.8, 0.2)],
)
def test_a_wrong_step_time_is_blamed_in_a_saturated_recording_too(
    rate_per_s: float, slower: float, throughput: float
) -> None:
    assert error_of(measures(replayed(loaded(rate_per_s), slower))["tokens_per_s"]) == pytest.approx(
        throughput, abs=0.01
    )


def test_a_queue_of_the_simulator_alone_excuses_nothing() -> None:
    """At 36 a second the server keeps up, and one that is a fifth slower does not."""
    found = judged(loaded(36), 1.2)
    assert (found.from_us, found.observed.from_us) == (None, None)
    assert found.simulated.from_us is not None


def overloaded_at(slower: float, spec: SyntheticExperiment | None = None) -> Comparison:
    """The verdict on a replay of a recording that the instrument check calls overloaded: 60 a second of 37."""
    run = replayed(spec or loaded(60), slower)
    called, why = overloaded(run.recording)
    assert called
    finding = Finding(OVERLOAD_CHECK, "note", "", why)
    return compare_replay(replace(run, recording=replace(run.recording, findings=(finding,))), queues=True)


@pytest.mark.parametrize("slower", [1.0, 1.05, 0.95])
def test_a_simulator_within_the_thresholds_passes_an_overloaded_recording(slower: float) -> None:
    """5 % of a step are 5 % of everything that is judged, and within 10 %; what grows in the queue is not judged."""
    comparison = overloaded_at(slower)
    assert {quantity.state for quantity in comparison.judgement.judged} == {"within"}
    assert comparison.verdict == "PASS"
    errors = {quantity.key: quantity.error for quantity in comparison.judgement.judged}
    assert set(errors) == {"tokens_per_s", "requests_per_s", "e2e_outside", "ttft_outside", "makespan", "itl"}
    assert errors["tokens_per_s"] == pytest.approx(1 / slower - 1, abs=0.01)
    assert errors["itl"] == pytest.approx(slower - 1, abs=0.01)


@pytest.mark.parametrize("slower", [1.5, 1.2, 0.8])
def test_a_wrong_simulator_fails_an_overloaded_recording(slower: float) -> None:
    comparison = overloaded_at(slower)
    assert comparison.verdict == "FAIL"
    assert {"tokens_per_s", "itl"} <= {quantity.key for quantity in comparison.judgement.beyond}
    answer = comparison_answer(comparison)
    assert answer.exit_code == 1
    assert answer.document["judgement"]["overloaded"]
    assert mean_abs_errors([comparison.judgement])["e2e"] is None


def burst() -> SyntheticExperiment:
    """600 requests within a second: all of their E2E is the queue's."""
    return SyntheticExperiment(stages=(Stage(0, 600.0, 1_000_000),), engine=ENGINE)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "PASS"), (1.05, "PASS"), (1.5, "FAIL"), (0.7, "FAIL")])
def test_a_burst_is_judged_by_how_long_it_took(slower: float, verdict: str) -> None:
    comparison = overloaded_at(slower, burst())
    assert comparison.verdict == verdict
    errors = {quantity.key: quantity.error for quantity in comparison.judgement.judged}
    assert errors["makespan"] == pytest.approx(slower - 1, abs=0.02)


def test_a_load_stage_by_itself_is_not_judged() -> None:
    comparison = overloaded_at(1.0)
    alone = compare_replay(comparison.run, selection=Selection(stage=1))
    assert alone.verdict == "NOT JUDGED"


def test_one_usable_request_of_600_is_no_pass() -> None:
    """A true simulator; 599 of the recorded requests lost their latencies."""
    run = replayed(loaded(20))
    requests = run.recording.requests.frame()
    alone = pl.Series([True] + [False] * (requests.height - 1))
    kept = [pl.when(alone).then(pl.col(name)).alias(name) for name in ("ttft_us", "e2e_us")]
    left = replace(run, recording=replace(run.recording, requests=rows_of(requests.with_columns(kept))))
    assert compare_replay(run).verdict == "PASS"
    comparison = compare_replay(left)
    assert (comparison.verdict, comparison_answer(comparison).exit_code) == ("NOT JUDGED", 4)
    said = " ".join(str(comparison_answer(comparison)).split())
    assert f"only 1 of {requests.height:,} requests have latencies" in said


def test_of_what_never_queues_nothing_is_said() -> None:
    assert saturation(replayed(loaded(20))) is None


@pytest.mark.parametrize("said", ["error", "aborted"])
def test_many_failures_without_a_queue_are_no_overload(said: str) -> None:
    """A fifth of 1,050 requests ends after 100 ms, by the server or by the client: nothing queues."""
    run = replayed(loaded(15, failures=210))
    requests = run.recording.requests.frame()
    status = pl.when(pl.col("status") == "ok").then("status").otherwise(pl.lit(said))
    failed = replace(run.recording, requests=rows_of(requests.with_columns(status.alias("status"))))
    assert saturation(replace(run, recording=failed)) is None


def test_a_wait_counts_from_the_last_request_that_found_a_place() -> None:
    """One arrival a second; waits of 1, 2, ... s from the sixth on, until the last five; a stage ends at 14 s."""
    arrival_us = np.arange(20) * 1_000_000
    wait_us = np.array([0] * 5 + [1_000_000 * i for i in range(1, 11)] + [0] * 5)
    assert queue(arrival_us, wait_us, [14_000_000]).from_us == 4_000_000
    assert queue(arrival_us, wait_us, [14_000_000]).until_us == 15_000_000
    # It grew through no stage: a queue of 11 s that went away.
    assert queue(arrival_us, wait_us, []).from_us is None
    assert queue(arrival_us, wait_us, []).touched_us == 11_000_000


def test_a_server_at_its_limit_is_judged_by_its_latencies() -> None:
    """40 requests a second of about 37: 77 wait after 30 s, two standard errors of what chance alone adds."""
    assert not overloaded(made(loaded(40, 0))[1])[0]
    assert judged(loaded(40, 0)).from_us is None


def test_two_late_requests_are_no_queue() -> None:
    wait_us = np.zeros(20, np.int64)
    wait_us[[7, 8]] = 60_000_000
    assert queue(np.arange(20) * 1_000_000, wait_us, [19_000_000]).from_us is None


def served_in_turn(rate_per_s: float, stall_s: float = 0.0, stall_at: int = 0, requests: int = 600) -> pl.DataFrame:
    """Poisson arrivals at a server that takes 0.1 s for each, one after the other, and stands still once."""
    arrival_s = np.cumsum(np.random.default_rng(5).exponential(1 / rate_per_s, requests))
    done_s, ttft_s = 0.0, np.empty(requests)
    for i, at_s in enumerate(arrival_s):
        done_s = max(done_s, at_s) + 0.1 + (stall_s if i == stall_at else 0.0)
        ttft_s[i] = done_s - at_s
    times = {"arrival_us": arrival_s * 1e6, "ttft_us": ttft_s * 1e6, "e2e_us": ttft_s * 1e6}
    return pl.DataFrame({name: values.astype(np.int64) for name, values in times.items()}).with_columns(
        stage=pl.lit(None, pl.Int64)
    )


@pytest.mark.parametrize(("rate_per_s", "grows"), [(7, False), (9.5, False), (10, False), (12, True), (20, True)])
def test_only_a_queue_that_grows_to_the_end_is_overload(rate_per_s: float, grows: bool) -> None:
    """Ten a second can be served.  At 95 % of them requests wait for a second and the queue stands."""
    assert bool(growths(served_in_turn(rate_per_s))) == grows


@pytest.mark.parametrize("stall_at", [0, 200, 400, 500, 570])
def test_a_server_that_stood_still_once_is_not_overloaded(stall_at: int) -> None:
    """16 s at 7 of 10 requests a second: the queue of the stall is gone after 37 s, or the run ends before that."""
    assert not growths(served_in_turn(7, 16.0, stall_at))


def closed_loop(clients: int, requests: int) -> Recording:
    """Each client sends its next request when its last one is done, after 1 s."""
    _, recording = made(loaded(20))
    frame = (
        recording.requests.frame()
        .head(requests)
        .with_columns(
            arrival_us=pl.Series([(i % clients) * 100_000 + i // clients * 1_000_000 for i in range(requests)]),
            e2e_us=pl.lit(1_000_000, pl.Int64),
        )
    )
    return replace(recording, requests=rows_of(frame))


def test_a_client_at_its_limit_is_seen() -> None:
    """The fourth client sends first at 0.3 s; from then on there are 4 in flight."""
    (limit,) = client_limits(closed_loop(4, 80))
    assert (limit.stage, limit.in_flight, limit.from_us) == (0, 4, 300_000)


def test_requests_that_take_no_time_have_no_limit() -> None:
    recording = closed_loop(4, 80)
    at_once = recording.requests.frame().with_columns(e2e_us=pl.lit(0, pl.Int64))
    assert client_limits(replace(recording, requests=rows_of(at_once))) == ()


@pytest.mark.parametrize("rate_per_s", [20, 60])
def test_an_open_load_has_no_limit(rate_per_s: float) -> None:
    assert client_limits(made(loaded(rate_per_s))[1]) == ()


def test_remark_and_json_have_the_second_from_which_on_latencies_measure_the_queue() -> None:
    found = judged(loaded(60), 1.2)
    first = found.remarks[0]
    assert (first.code, first.values["until_s"]) == ("saturates", None)
    assert first.values["from_s"] == found.document["meaningless_from_s"] == pytest.approx(21.3, abs=0.3)


@pytest.mark.parametrize(
    ("name", "in_flight"),
    # Llama-2-7B has 7,462 KV blocks of 16 tokens: 1,550 a request, a prompt of 1,082 and a third of the output.
    # The others queue when as many are in flight as max_num_seqs allows.
    [("7b-reasoning", 77), ("34b-reasoning", 128), ("70b-hf-reasoning", 128), ("mixtral-reasoning", 128)],
)
def test_overloaded_recordings_queue_when_their_places_are_taken(real_store: Store, name: str, in_flight: int) -> None:
    recording = read_stored(real_store, find_experiment(real_store, name))
    found = saturation(replay(recording, load_release(DEFAULT_RELEASE)))
    assert found is not None
    assert found.in_flight == pytest.approx(in_flight, abs=2)
    assert found.observed.from_us == pytest.approx(in_flight / 4 * 1e6, rel=0.45)  # 4 requests a second, some done
    assert found.observed.until_us is None


def test_a_sweep_of_guidellm_is_serial_first_and_then_a_burst(real_store: Store) -> None:
    """Its strategies in order (data notes, section 3): synchronous, throughput (40 at once), three constant rates."""
    recording = read_stored(real_store, find_experiment(real_store, "34b-prefillheavy"))
    fitted = LatencyModel("blackbox", 25_600_000, 95_500, 205_800)  # a line through its own latencies
    entry = ModelEntry(str(recording.model), 1, fitted, Lifecycle())
    release = CoefficientRelease("own", "valid", "s", "s", "H100", "0" * 64, (entry,), fitted_on=())
    found = saturation(replay(recording, release))
    assert found is not None
    assert [(limit.stage, limit.in_flight) for limit in found.client_limits] == [(0, 1)]
    burst_us = recording.requests.frame().filter(pl.col("stage") == 1)["arrival_us"]
    assert burst_us.min() <= found.observed.from_us <= burst_us.max()  # type: ignore[operator]  # there are some


def test_llama_2_7b_is_saturated_and_its_simulator_right(real_store: Store) -> None:
    recording = read_stored(real_store, find_experiment(real_store, "7b-reasoning"))
    run = replay(recording, load_release(DEFAULT_RELEASE))
    found = saturation(run)
    assert found is not None
    assert error_of(measures(run)["tokens_per_s"]) == pytest.approx(0, abs=0.05)
    assert found.failed == 4068  # data notes, section 1


def test_a_recording_that_only_touches_its_limit_is_not_meaningless(real_store: Store) -> None:
    """70b-general: waiting in 4.5 % of the steps of its second stage (data notes, section 2), of 600 s that is 27 s."""
    recording = read_stored(real_store, find_experiment(real_store, "70b-general"))
    found = saturation(replay(recording, load_release(DEFAULT_RELEASE)))
    assert found is not None
    assert found.from_us is None
    assert found.observed.touched_us == pytest.approx(27e6, rel=0.25)
    # 22.9 s. The queue of a server at its limit moves by far more than its step time is off: 19.9 s with the release,
    # and as long as the server's with steps that take less than 1 % longer.
    longer = saturation(replay(recording, _with_steps(load_release(DEFAULT_RELEASE), recording.model, 1.01)))
    assert longer is not None
    assert found.simulated.touched_us < found.observed.touched_us < longer.simulated.touched_us


def _with_steps(release: CoefficientRelease, model: str, times: float) -> CoefficientRelease:
    """A release whose steps of a bent model take so many times as long."""
    entry = next(entry for entry in release.models if entry.model.lower() == model.lower())
    assert isinstance(entry.latency, RegimeModel)
    regimes = tuple(
        replace(
            regime,
            intercept_us=times * regime.intercept_us,
            coefficients=tuple((name, times * value) for name, value in regime.coefficients),
        )
        for regime in entry.latency.regimes
    )
    longer = replace(entry, latency=replace(entry.latency, regimes=regimes))
    return replace(release, models=tuple(longer if one is entry else one for one in release.models))


def test_rows_of_an_overloaded_run_are_what_is_judged() -> None:
    comparison = overloaded_at(1.5)
    table = comparison_answer(comparison).table
    rows = [dict(zip(table.names, row, strict=True)) for row in table.rows]
    judged = {quantity.key: quantity for quantity in comparison.judgement.judged}
    assert {row["metric"]: (row["state"], row["limit"]) for row in rows} == {
        key: (quantity.state, quantity.limit) for key, quantity in judged.items()
    }
    by_metric = {row["metric"]: row for row in rows}
    makespan, tokens = judged["makespan"].observed, judged["tokens_per_s"].observed
    assert makespan is not None and by_metric["makespan"]["observed_ms"] == pytest.approx(1000 * makespan)
    assert (by_metric["tokens_per_s"]["observed_ms"], by_metric["tokens_per_s"]["observed_per_s"]) == (None, tokens)
    alone = comparison_answer(compare_replay(comparison.run, selection=Selection(stage=1))).table
    assert [(row[4], row[-1]) for row in alone.rows] == [
        ("NOT JUDGED", "overloaded, and a load stage by itself is not judged")
    ]


def test_all_of_an_overloaded_run_is_without_the_latencies_of_its_queue() -> None:
    comparison = overloaded_at(1.0)
    assert comparison.saturation is not None and comparison.overloaded
    text = page_text(comparison_page(comparison))
    assert "ITL mean" in text and "E2E mean" not in text and "TTFT p99" not in text and "MAPE" not in text
    names = {quantity.name for quantity in comparison.judgement.judged}
    assert f"E2E of {comparison.saturation.outside.sum():,} outside the queue" in names


@pytest.mark.parametrize(("rejected", "verdict"), [(1, "PASS"), (30, "NOT JUDGED")])
def test_one_rejected_record_of_many_is_judged_and_said(rejected: int, verdict: str) -> None:
    """Also of what is kept of many experiments, without the requests."""
    run = replayed(loaded(20))
    sent = run.recording.requests.height
    file = SourceFile("requests.csv", request_formats()[0].name, 1, "0" * 64, sent, rejected)
    whole = compare_replay(replace(run, recording=replace(run.recording, files=(file,))), queues=True)
    for comparison in (whole, light(whole)):
        assert comparison.verdict == verdict
        assert "rejected_records" in {one.code for one in comparison.judgement.remarks}
        assert [one.values for one in comparison.lost] == ([{"rejected": 30, "all": sent + 30}] if rejected > 1 else [])
