"""A range of /metrics samples of a server whose requests are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blis_runs import release_of
from polars.testing import assert_frame_equal

from blis_replay.base.errors import RecordingError
from blis_replay.blis.closed_loop import simulate_load
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import PUBLISHED
from blis_replay.ingest.served import published
from blis_replay.ingest.store import open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import drawn_arrivals
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.metrics.observed import numbers_from_aggregates

# 10 ms a step, 40 us a prefill token, 50 us a decode.
SERVER, NO_DELAY = LatencyModel("blackbox", 10_000_000, 40_000, 50_000), Lifecycle(pre_queue_us=0.0)
ENGINE = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2_048, max_model_len=4_096, async_scheduling=False)
EACH_S = 5  # seconds between samples
BUCKETS_S = ("0.02", "0.04", "0.08", "0.2", "0.5", "1", "1.5", "2.5", "+Inf")


@pytest.fixture(scope="module")
def served() -> tuple[RequestTrace, SimResult]:
    """2 requests per second in the first two minutes, 6 in the next two: prompts of 300 and outputs of 80 tokens."""
    random = np.random.default_rng(3)
    arrival_us = np.concatenate([np.sort(random.uniform(0, 120e6, 240)), np.sort(random.uniform(120e6, 240e6, 720))])
    count = len(arrival_us)
    prompt, output = random.integers(280, 321, count), random.integers(75, 86, count)
    trace = RequestTrace(arrival_us.astype(np.int64), prompt, prompt, output, np.full(count, NEVER_US))
    return trace, simulate_load(trace, ENGINE, SERVER, NO_DELAY, None, None)


def answer(
    served: tuple[RequestTrace, SimResult], first_s: int = 0, last_s: int = 245, each_s: int = EACH_S
) -> dict[str, object]:
    """What Prometheus answers: samples each 5 s, those of two engines apart."""
    trace, result = served
    times = np.arange(first_s, last_s + 1, each_s)
    first_us, end_us = trace.arrival_us + result.ttft_us, trace.arrival_us + result.e2e_us
    series: list[dict[str, object]] = []

    def add(name: str, values: list[float], **labels: str) -> None:
        metric = {"__name__": f"vllm:{name}", "model_name": "some/Model", **labels}
        series.append({"metric": metric, "values": [[float(t), str(v)] for t, v in zip(times, values, strict=True)]})

    for engine in (0, 1):
        mine = np.arange(len(trace)) % 2 == engine
        label = {"engine": str(engine)}
        done = [mine & (end_us <= t * 1e6) for t in times]
        begun = [mine & (first_us <= t * 1e6) for t in times]
        add("request_success_total", [float(d.sum()) for d in done], finished_reason="length", **label)
        add("request_success_total", [float(t > 100) for t in times], finished_reason="abort", **label)
        running = [float((mine & (trace.arrival_us <= t * 1e6) & (end_us > t * 1e6)).sum()) for t in times]
        add("num_requests_running", running, **label)
        add("num_requests_waiting", [0.0 for _ in times], **label)
        cached = trace.prompt_tokens - trace.prefill_tokens
        add("prompt_tokens_cached_total", [float(cached[chosen].sum()) for chosen in begun], **label)
        add("prompt_tokens_total", [float(trace.prompt_tokens[chosen].sum()) for chosen in begun], **label)
        for name, of, when, unit in (
            ("time_to_first_token_seconds", result.ttft_us, begun, 1e6),
            ("e2e_request_latency_seconds", result.e2e_us, done, 1e6),
            ("request_prompt_tokens", trace.prompt_tokens, done, 1),
            ("request_generation_tokens", trace.output_tokens, done, 1),
        ):
            add(f"{name}_sum", [float(of[chosen].sum() / unit) for chosen in when], **label)
            add(f"{name}_count", [float(chosen.sum()) for chosen in when], **label)
            for le in BUCKETS_S if unit == 1e6 else ():
                add(
                    f"{name}_bucket",
                    [float((chosen & (of / unit <= float(le))).sum()) for chosen in when],
                    le=le,
                    **label,
                )
    return {"status": "success", "data": {"resultType": "matrix", "result": series}}


def written(folder: Path, document: dict[str, object]) -> Path:
    (folder / "range.json").write_text(json.dumps(document))
    (folder / "engine.yaml").write_text(
        "max_num_seqs: 64\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: false\n"
    )
    return folder


def test_windows_are_stages_with_what_came_in_them(served: tuple[RequestTrace, SimResult], tmp_path: Path) -> None:
    """Windows of 15 s, the last of 20: 240 requests and 2 that were aborted in the first 8, 720 in the next 8."""
    trace, result = served
    with read_recording(written(tmp_path, answer(served))) as recording:
        assert (recording.ground_truth, recording.model) == (PUBLISHED, "some/Model")
        sent = [published(recording.aggregates, stage.stage, "requests", "sent") or 0 for stage in recording.stages]
        assert [stage.duration_us for stage in recording.stages[1:]] == [15_000_000] * 14 + [20_000_000]
        assert (len(sent), sum(sent[:8]), sum(sent)) == (16, 242, 962)
        rates = [stage.rate_per_s * stage.duration_us / 1e6 for stage in recording.stages]
        assert rates == pytest.approx(sent)
        whole = {m: published(recording.aggregates, -1, m, "mean") for m in ("ttft", "output_tokens_reported")}
    seen = trace.arrival_us + result.e2e_us <= 245e6
    assert whole["output_tokens_reported"] == pytest.approx(trace.output_tokens[seen].mean(), rel=1e-6)
    assert whole["ttft"] == pytest.approx(result.ttft_us[trace.arrival_us + result.ttft_us <= 245e6].mean(), rel=1e-6)


def test_requests_are_rebuilt_from_what_was_counted(tmp_path: Path) -> None:
    """At one request a second, samples of each second give exact lengths, and each arrival within a second."""
    random = np.random.default_rng(9)
    arrival_us = (np.arange(60) * 1_000_000 + random.uniform(0.1e6, 0.6e6, 60)).astype(np.int64)
    prompt, output = random.integers(100, 900, 60), random.integers(5, 30, 60)
    trace = RequestTrace(arrival_us, prompt, prompt - prompt // 3, output, np.full(60, NEVER_US))
    run = (trace, simulate_load(trace, ENGINE, SERVER, NO_DELAY, None, None))
    with read_recording(written(tmp_path, answer(run, 0, 62, each_s=1))) as recording:
        requests, zero_us = recording.requests.frame(), recording.clocks[0].zero_us
        draws = [drawn_arrivals(recording, seed) for seed in range(30)]
    assert requests.height == 60
    assert requests["prompt_tokens"].to_list() == prompt.tolist()
    assert requests["output_tokens"].to_list() == output.tolist()
    assert requests["cached_prompt_tokens"].to_list() == (prompt // 3).tolist()
    off_us = np.abs(requests["arrival_us"].to_numpy() - (arrival_us - zero_us))
    assert (off_us <= requests["arrival_within_us"].to_numpy() + 1).all()
    assert requests["arrival_within_us"].max() <= 500_000  # type: ignore[operator]
    # Draws lie around them, uniform: a third of the width is their mean absolute distance from each other.
    apart_us = np.abs(np.diff(draws, axis=0)).mean()
    assert apart_us == pytest.approx(2 / 3 * requests["arrival_within_us"].mean(), rel=0.1)
    assert requests["ttft_us"].null_count() == requests["e2e_us"].null_count() == 60


def test_samples_that_prometheus_repeats_are_no_new_ones(
    served: tuple[RequestTrace, SimResult], tmp_path: Path
) -> None:
    """A server that is scraped each 5 s, asked with ``step=1s``: the requests and stages of its scrapes."""
    document = answer(served)
    with read_recording(written(tmp_path, document)) as recording:
        of_scrapes = recording.requests.frame()
    for one in document["data"]["result"]:  # type: ignore[index]
        one["values"] = [[t + i, value] for t, value in one["values"] for i in range(EACH_S)]
    with read_recording(written(tmp_path, document)) as recording:
        repeated, stages = recording.requests.frame(), recording.stages
    assert [stage.duration_us for stage in stages[1:]] == [15_000_000] * 14 + [20_000_000]
    assert_frame_equal(repeated, of_scrapes)


def test_scrapes_that_keep_no_pace_with_the_step_may_be_a_step_old(tmp_path: Path) -> None:
    """Scraped each 15 s, asked each 10 s: 53 % of arrivals would lie outside of what is said of them."""
    random = np.random.default_rng(6)
    arrival_us = np.sort(random.uniform(1e6, 580e6, 600)).astype(np.int64)
    trace = RequestTrace(arrival_us, *np.full((2, 600), 200), np.full(600, 30), np.full(600, NEVER_US))
    run = (trace, simulate_load(trace, ENGINE, SERVER, NO_DELAY, None, None))
    document = answer(run, 0, 600, each_s=15)
    for one in document["data"]["result"]:  # type: ignore[index]
        at = dict(map(tuple, one["values"]))
        served_only = one["metric"].get("finished_reason") != "abort"
        one["values"] = [[float(t), at[t // 15 * 15.0] if served_only else "0"] for t in range(0, 601, 10)]
    with read_recording(written(tmp_path, document)) as recording:
        requests, zero_us = recording.requests.frame(), recording.clocks[0].zero_us
    off_us = np.abs(requests["arrival_us"].to_numpy() - (arrival_us[: requests.height] - zero_us))
    outside = (off_us > requests["arrival_within_us"].to_numpy() + 1).mean()
    assert outside < 0.05


def test_requests_that_were_not_served_are_refused_beyond_a_few(
    served: tuple[RequestTrace, SimResult], tmp_path: Path
) -> None:
    """Two of 962 are taken as served.  20 that are counted as aborted are refused, like 20 that leave uncounted."""
    document = answer(served)
    series = document["data"]["result"]  # type: ignore[index]
    aborted = next(one for one in series if one["metric"].get("finished_reason") == "abort")
    running = next(one for one in series if one["metric"]["__name__"] == "vllm:num_requests_running")
    for changed in (aborted, running):
        kept = changed["values"]
        more = [20.0 if (t > 100) == (changed is aborted) else 0.0 for t, _ in kept]
        changed["values"] = [[t, str(float(value) + extra)] for (t, value), extra in zip(kept, more, strict=True)]
        with (
            pytest.raises(RecordingError, match="failed or were given up"),
            read_recording(written(tmp_path, document)),
        ):
            pass
        changed["values"] = kept


def test_a_queue_longer_than_the_range_leaves_prompts_their_mean(tmp_path: Path) -> None:
    """All first tokens are of requests that had come before: lengths are the mean of these, 500 tokens."""
    arrival_us = np.concatenate([np.zeros(300), np.arange(40) * 1e6 + 2_000_000]).astype(np.int64)
    prompt, output = np.full(340, 500), np.full(340, 400)
    trace = RequestTrace(arrival_us, prompt, prompt, output, np.full(340, NEVER_US))
    run = (trace, simulate_load(trace, replace(ENGINE, max_num_seqs=8), SERVER, NO_DELAY, None, None))
    document = answer(run, 1, 41, each_s=1)
    first_us = arrival_us + run[1].ttft_us
    for one in document["data"]["result"]:  # type: ignore[index]
        mine = np.arange(340) % 2 == int(one["metric"]["engine"])
        if one["metric"]["__name__"].startswith("vllm:num_requests_"):
            queued = [float((mine & (arrival_us <= t * 1e6) & (first_us > t * 1e6)).sum()) for t, _ in one["values"]]
            if one["metric"]["__name__"].endswith("running"):
                queued = [float(v) - q for (_, v), q in zip(one["values"], queued, strict=True)]
            one["values"] = [[t, str(q)] for (t, _), q in zip(one["values"], queued, strict=True)]
    with read_recording(written(tmp_path, document)) as recording:
        requests = recording.requests.frame()
    assert requests.height == 40
    assert set(requests["prompt_tokens"].to_list()) == {500}
    assert set(requests["output_tokens"].to_list()) == {400}


def test_samples_of_two_servers_are_refused(served: tuple[RequestTrace, SimResult], tmp_path: Path) -> None:
    document = answer(served)
    series = document["data"]["result"]  # type: ignore[index]
    other = [one | {"metric": one["metric"] | {"model_name": "another/Model"}} for one in series]
    document["data"]["result"] = [*series, *other]  # type: ignore[index]
    with pytest.raises(RecordingError, match="several servers or models"), read_recording(written(tmp_path, document)):
        pass


def test_the_cache_is_known_as_far_as_all_engines_say_the_same(
    served: tuple[RequestTrace, SimResult], tmp_path: Path
) -> None:
    document = answer(served)
    for engine, blocks in (("0", "500"), ("1", "480")):
        labels = {"engine": engine, "block_size": "32", "num_gpu_blocks": blocks}
        metric = {"__name__": "vllm:cache_config_info", "model_name": "some/Model", **labels}
        document["data"]["result"].append({"metric": metric, "values": [[0.0, "1"]]})  # type: ignore[index]
    with read_recording(written(tmp_path, document)) as recording:
        assert recording.engine["block_size"].value == 32
        assert "num_gpu_blocks" not in recording.engine


def test_windows_begin_with_the_first_request(tmp_path: Path) -> None:
    """Samples each 15 s, the first request at second 14.7 of them: windows are those of its clock, to half a sample."""
    random = np.random.default_rng(4)
    arrival_us = np.sort(random.uniform(14.7e6, 300e6, 900)).astype(np.int64)
    trace = RequestTrace(arrival_us, *np.full((2, 900), 200), np.full(900, 40), np.full(900, NEVER_US))
    run = (trace, simulate_load(trace, ENGINE, SERVER, NO_DELAY, None, None))
    with read_recording(written(tmp_path, answer(run, 0, 315, each_s=15))) as recording:
        ends_us = np.cumsum([stage.duration_us for stage in recording.stages])
        zero_us = recording.clocks[0].zero_us
    assert ends_us[-1] + zero_us == pytest.approx(315e6, abs=2)


def test_quantiles_lie_between_the_bounds_of_their_bucket(
    served: tuple[RequestTrace, SimResult], tmp_path: Path
) -> None:
    """The bounds are next to the quantile of the requests that ended; what is above the last bound has none."""
    trace, result = served
    with read_recording(written(tmp_path, answer(served))) as recording:
        numbers = numbers_from_aggregates(recording, None)
    ended = trace.arrival_us + result.e2e_us <= 245e6
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        true_s = float(np.quantile(result.e2e_us[ended], share, method="inverted_cdf")) / 1e6
        i = next(i for i, le in enumerate(BUCKETS_S) if true_s <= float(le))
        expected = (float(BUCKETS_S[i - 1]) * 1e6, float(BUCKETS_S[i]) * 1e6)
        assert (numbers["e2e"][name].value_us, numbers["e2e"][name].between_us) == (None, expected)


@pytest.mark.heavy
def test_counters_of_several_loads_tell_the_costs_of_a_step(tmp_path: Path) -> None:
    """Six loads of two minutes each; the server is ``SERVER``, whose costs lie within the bounds of the fit."""
    random, parts, begin_us = np.random.default_rng(5), [], 0.0
    for rate, prompt, output in ((2, 300, 80), (6, 300, 80), (3, 900, 40), (1, 100, 200), (8, 150, 100), (4, 600, 60)):
        count = rate * 120
        sent_us = np.sort(random.uniform(begin_us, begin_us + 120e6, count))
        lengths = [random.integers(0.8 * of, 1.2 * of, count) for of in (prompt, output)]
        parts.append(np.stack([sent_us, *lengths]).astype(np.int64))
        begin_us += 120e6
    sent_us, prompts, outputs = np.concatenate(parts, axis=1)
    trace = RequestTrace(sent_us, prompts, prompts, outputs, np.full(len(sent_us), NEVER_US))
    counted = (trace, simulate_load(trace, ENGINE, SERVER, NO_DELAY, None, None))
    with read_recording(written(tmp_path, answer(counted, 0, 725))) as recording:
        _, (fit,) = calibrate([recording], "fit", Options(load_release(DEFAULT_PRIOR)))
    found = {c.name: c for c in fit.record.coefficients}
    assert found["intercept"].value_us == pytest.approx(10_000, rel=0.05)
    assert found["per_prefill_token"].value_us == pytest.approx(40, rel=0.1)
    decode = found["per_decode_token"]
    assert decode.low_us <= 50 <= decode.high_us
    assert fit.rows > 20


@pytest.mark.slow
def test_the_server_itself_predicts_what_it_counted(served: tuple[RequestTrace, SimResult], tmp_path: Path) -> None:
    """Requests are rebuilt from counters, so the same coefficients give nearly the same means."""
    folder = tmp_path / "mine"
    folder.mkdir()
    with read_recording(written(folder, answer(served))) as recording, open_store(tmp_path / "s.duckdb") as store:
        ingest_recording(store, replace(recording, slug="mine", alias="mine"))
    with open_store(tmp_path / "s.duckdb", read_only=True) as store:
        comparison = compare_experiment(store, "mine", release_of(SERVER, NO_DELAY), ReplayMode())
    assert comparison.metrics["e2e"]["mean"].error == pytest.approx(0, abs=0.03)
    assert comparison.metrics["ttft"]["mean"].error == pytest.approx(0, abs=0.10)


def test_what_is_no_range_of_one_server_is_refused(served: tuple[RequestTrace, SimResult], tmp_path: Path) -> None:
    document = answer(served)
    series = document["data"]["result"]  # type: ignore[index]
    restarted = [one | {"values": one["values"][:20] + [[t, "0"] for t, _ in one["values"][20:]]} for one in series]
    for result, problem in (
        (restarted, "falls: the server was started again"),
        (series[:1], "no samples of vllm:num_requests_running"),
        ([one | {"values": one["values"][:1]} for one in series], "fewer than two samples, or no requests"),
        ([one | {"values": one["values"][::-1][:1] * (i % 2)} for i, one in enumerate(series)], "no samples of vllm:"),
        (
            [one | {"values": [[t, str(float(v) * 1e12)] for t, v in one["values"]]} for one in series],
            "more than 5,000",
        ),
    ):
        changed = {"status": "success", "data": {"resultType": "matrix", "result": result}}
        with pytest.raises(RecordingError, match=problem), read_recording(written(tmp_path, changed)):
            pass
