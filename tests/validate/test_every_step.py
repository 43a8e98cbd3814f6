"""Coefficients from a step log: what is planted in a made-up server comes out of its own recording."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fake_vllm import Request, Scheduler

from blis_replay.base.document import read_yaml
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import CorrectedModel, LatencyModel, Roofline
from blis_replay.blis.releases.draws import scattered
from blis_replay.blis.releases.fit import PartScore, Scatter
from blis_replay.blis.releases.release import format_release
from blis_replay.blis.trace import KvCacheGroup
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import open_store, read_stored
from blis_replay.replay.release_file import load_release
from blis_replay.validate.fit.calibrate import ModelFit, Options, calibrate
from blis_replay.validate.fit.every_step import STEP_COSTS, Measured, _delays, _roofline_of, measure, scatter_of
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.fit.scores import missed

US = 1_000
# Of a step, and per prefill token, decode token, context token of a decode, 1,000 tokens that prefill attends to.
PLANTED_US = (5_000.0, 150.0, 400.0, 1.5, 300.0)
# From the API server to the queue: at no prompt, and per prompt token.
WAY_US, WAY_PER_TOKEN_US = 3_000.0, 10.0


def step_log(
    requests: int,
    seed: int,
    held_up_us: dict[int, float] | None = None,
    slower: float = 1.0,
    groups: tuple[KvCacheGroup, ...] = (),
) -> list[Any]:
    """The log of the fake scheduler in virtual time: steps take what is planted, and nothing else takes time.

    ``held_up_us``: how much longer some steps take.  ``slower``: by what factor the steps of the last half do.
    ``groups``: of layers, which attend to what these do.
    """
    drawn = np.random.default_rng(seed)
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=512)
    now_us, lines = 0.0, []
    sent_us = np.cumsum(drawn.exponential(150_000, requests))
    prompts, outputs = drawn.integers(20, 700, requests), drawn.integers(2, 40, requests)
    ready_us = sent_us + WAY_US + WAY_PER_TOKEN_US * prompts
    coming = list(np.argsort(ready_us, kind="stable"))
    step = 0
    while coming or scheduler.requests:
        if not scheduler.requests:
            now_us = max(now_us, float(ready_us[coming[0]]))
        while coming and ready_us[coming[0]] <= now_us:
            number = int(coming.pop(0))
            scheduler.add_request(Request(str(number), int(prompts[number]), int(outputs[number])))
            stamps = (_ns(now_us), _ns(now_us), _ns(now_us), _ns(sent_us[number]))
            lines.append(["a", number, str(number), *stamps, int(prompts[number]), int(outputs[number]), 0, None, 0])
        before = {name: (r.num_computed_tokens, r.num_prompt_tokens) for name, r in scheduler.requests.items()}
        output = scheduler.schedule()
        tokens = {int(name): count for name, count in output.num_scheduled_tokens.items()}
        ones, others = [n for n, c in tokens.items() if c == 1], [[n, c] for n, c in tokens.items() if c != 1]
        admitted = [[int(new.req_id), 0] for new in output.scheduled_new_reqs]
        depths = (len(scheduler.running), len(scheduler.waiting), 50)
        lines.append(["s", step, _ns(now_us), 0, 1_000, *depths, ones, others, admitted, []])
        pace = slower if now_us > ready_us.max() / 2 else 1.0
        now_us += pace * step_us(output.num_scheduled_tokens, before, groups) + (held_up_us or {}).get(step, 0.0)
        there = dict(scheduler.requests)
        scheduler.update_from_output(output, None)
        for name in there.keys() - scheduler.requests.keys():
            ended = there[name]
            counts = (ended.num_output_tokens, 0, ended.num_computed_tokens)
            lines.append(["f", int(name), _ns(now_us), "FINISHED_LENGTH_CAPPED", *counts])
        lines.append(["u", step, _ns(now_us), 0, []])
        step += 1
    return lines


def step_us(tokens: dict[str, int], before: dict[str, tuple[int, int]], groups: tuple[KvCacheGroup, ...] = ()) -> float:
    """What is planted, for one step."""
    prefill = decodes = 0
    context = attended = 0.0
    for name, count in tokens.items():
        computed, prompt = before[name]
        seen = sum(in_mean_layer(groups, n) for n in range(computed + 1, computed + count + 1))
        if computed < prompt:
            prefill += count
            attended += seen
        else:
            decodes, context = decodes + 1, context + seen
    return float(np.dot(PLANTED_US, (1, prefill, decodes, context, attended / 1000)))


def in_mean_layer(groups: tuple[KvCacheGroup, ...], n: int) -> float:
    """KV tokens that the ``n``-th token of a request attends to: all, a window's, those of its chunk, or a state."""
    of = {"full": lambda _: n, "window": lambda size: min(n, size), "chunk": lambda size: (n - 1) % size + 1}
    return float(np.mean([0 if g.kind == "state" else of[g.kind](g.size) for g in groups])) if groups else n


def _ns(us: float) -> int:
    return round(us) * US


def recorded(folder: Path, lines: list[Any], more: dict[str, Any] | None = None, **settings: object) -> Recording:
    """What is read of the log of a run; ``settings``: of the server, in place of those of the fake scheduler.

    ``more``: what its header has besides.
    """
    served = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 2048, "block_size": 16}
    header = {
        "blis_replay_steps": 1,
        "started": {"monotonic_ns": 0, "wall_ns": 0},
        "vllm": "0.32.0",
        "model": "some/model",
        "settings": {**served, "async_scheduling": False, "enable_prefix_caching": False, **settings},
        "absent": [],
        **(more or {}),
    }
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in [header, *lines])
    (folder / "steps.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    ingest_source(store := folder.parent / "store.duckdb", folder)
    with open_store(store) as opened:
        return read_stored(opened, folder.name)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    """Two runs of 150 requests."""
    folder = tmp_path_factory.mktemp("every_step")
    return [recorded(folder / f"run-{seed}", step_log(150, seed)) for seed in (1, 2)]


def measured(recordings: list[Recording]) -> tuple[Measured, dict[str, float]]:
    """What is measured over whole runs, and the costs by name."""
    found = measure(recordings, (0.0, 1.0))
    assert found is not None
    return found, {fit.name: fit.value_us for fit in found.coefficients}


def calibrated(recording: Recording, **options: Any) -> ModelFit:
    """Its fit to all of a run."""
    return calibrate([recording], "mine", Options(load_release(DEFAULT_PRIOR), split=(1.0, 1.0), **options))[1][0]


@pytest.mark.slow
def test_planted_costs_come_out(recordings: list[Recording]) -> None:
    """Each within 1 %: stamps are whole us, and steps take 5 ms or more."""
    found, costs = measured(recordings)
    assert [costs[name] for name in STEP_COSTS] == pytest.approx(PLANTED_US, rel=0.01)
    assert found.error < 0.001
    assert found.total == pytest.approx(0.0, abs=1e-4)


SPECS = {"full": "FullAttentionSpec", "window": "SlidingWindowSpec", "chunk": "ChunkedLocalAttentionSpec"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_planted_costs_of_a_model_with_windows_come_out(tmp_path: Path, kind: str) -> None:
    """Three layers of four attend to 128 tokens at most, of contexts of 20 to 740."""
    groups = (*[KvCacheGroup(kind, 128)] * 3, KvCacheGroup("full"))  # type: ignore[arg-type]
    sizes = {"window": "sliding_window", "chunk": "attention_chunk_size"}
    specs = [{"kind": SPECS[g.kind], "block_size": 16} | ({sizes[g.kind]: 128} if g.size else {}) for g in groups]
    header = {"kv_cache_groups": [spec["kind"] for spec in specs], "kv_cache_specs": specs}
    found, costs = measured([recorded(tmp_path / "run", step_log(150, 1, groups=groups), header)])
    assert [costs[name] for name in STEP_COSTS] == pytest.approx(PLANTED_US, rel=0.01)
    assert found.error < 0.001


@pytest.mark.slow
def test_planted_delays_come_out(recordings: list[Recording]) -> None:
    """A request waits for half a step on average, whatever that step is: the mean of 300 is right within 10 %."""
    _found, costs = measured(recordings)
    mean_prompt = 360
    around = costs["pre_queue"] + costs["pre_queue_per_prompt_token"] * mean_prompt
    assert around == pytest.approx(WAY_US + WAY_PER_TOKEN_US * mean_prompt, rel=0.1)
    assert costs["post_request"] == 0.0


def test_requests_of_a_time_in_which_the_machine_stood_still_say_nothing_of_delays() -> None:
    """10 ms for 227 requests, 900 ms for 13 in a row, 5.4 % of all: the mean of all would be 58 ms."""
    way_us = 10_000 + np.random.default_rng(1).normal(0, 2_000, 240)
    way_us[200:213] += 890_000
    columns = {"prompt_tokens": np.full(240, 200.0), "around_us": way_us, "later_us": np.zeros(240)}
    ways = pl.DataFrame(columns | {"weight": np.full(240, 1 / 3_000**2)})
    before, slope, _after = _delays(ways.to_numpy(), 1)
    assert before.value_us + 200 * slope.value_us == pytest.approx(10_000, rel=0.05)
    assert before.high_us < 12_000
    assert "of 227 requests with stamps of client and engine, 13 more that were held up left out" in before.remark


@pytest.mark.slow
def test_calibrate_measures_and_its_replay_is_the_run(recordings: list[Recording], tmp_path: Path) -> None:
    """Fitted to one run, the other's E2E is within 2 % and its TTFT within 4 %, and the release reads back."""
    release, (fit,) = calibrate(recordings[:1], "mine", Options(load_release(DEFAULT_PRIOR), split=(1.0, 1.0)))
    assert fit.record.form == "line through every step"
    assert fit.scheduling is None
    (score,) = fit.record.scores
    assert abs(score.errors["e2e"]) < 0.02
    assert abs(score.errors["ttft"]) < 0.04
    path = tmp_path / "mine.yaml"
    path.write_text(format_release(release), "utf-8")
    assert load_release(str(path)).models[0].latency == fit.entry.latency


def test_a_few_odd_prompts_tell_no_slope() -> None:
    """143 of 150 prompts have 300 tokens; the seven longer ones take 5 ms more, by chance."""
    prompts = np.full(150, 300.0)
    prompts[:7] = 302
    ways = np.column_stack([prompts, np.where(prompts > 300, 15_000, 10_000), np.zeros(150), np.full(150, 1e-7)])
    before, slope, _after = _delays(ways, 1)
    assert (slope.value_us, slope.high_us) == (0, 0)
    assert before.value_us == pytest.approx(10_000 + 5_000 * 7 / 150, rel=0.05)


def test_a_last_part_that_is_served_otherwise_is_said(recordings: list[Recording]) -> None:
    """62 % of a mean E2E beside 5 % that a fit may miss; the part that was fitted is right."""
    slug, alias = recordings[0].slug, recordings[0].alias
    scores = [PartScore(slug, "fit", 0, 0.8, 120, {"e2e": 0.01}), PartScore(slug, "test", 0.8, 1, 30, {"e2e": 0.62})]
    assert missed(scores, {"e2e": 0.0}, recordings) == ()
    (later,) = missed(scores, {"e2e": 0.0}, recordings, later=True)
    assert later.startswith(f"{alias} (test): mean E2E by +62.0%")


@pytest.mark.slow
def test_a_cold_start_and_a_stall_are_left_out_and_their_requests_do_not_count_as_missed(tmp_path: Path) -> None:
    """A first step of 3 s and one of 400 ms within: costs come out as planted, and the scores replay both."""
    fit = calibrated(recorded(tmp_path / "cold", step_log(150, 1, {0: 3_000_000.0, 500: 400_000.0})))
    costs = {cost.name: cost.value_us for cost in fit.record.coefficients}
    assert [costs[name] for name in STEP_COSTS] == pytest.approx(PLANTED_US, rel=0.01)
    assert fit.missed == ()
    (score,) = fit.record.scores
    assert abs(score.errors["e2e"]) < 0.02
    (remark,) = fit.remarks
    assert remark.startswith("model-cold: 2 steps took 3.4 s longer")


@pytest.mark.slow
def test_a_cold_start_is_left_out_of_a_fit_to_latencies_too(tmp_path: Path) -> None:
    """Without it E2E of the run would be 40 % off, and nothing written."""
    cold = recorded(tmp_path / "cold", step_log(150, 1, {0: 3_000_000.0}))
    fit = calibrated(cold, data="latencies")
    costs = {cost.name: cost.value_us for cost in fit.record.coefficients}
    assert costs["intercept"] == pytest.approx(PLANTED_US[0], rel=0.15)
    assert fit.missed == ()
    assert fit.remarks[0].startswith("model-cold: 1 step took 3.2 s longer")


@pytest.mark.slow
def test_a_machine_that_became_slower_misses_nothing_and_wrong_arguments_do(tmp_path: Path) -> None:
    """With recorded step times the slower run is right; half of the decodes at once leave it wrong.

    At 2.2 times the step time it keeps up with this load; at 2.4 its queue grows to the end.
    """
    slower = calibrated(recorded(tmp_path / "slower", step_log(150, 1, slower=2.2)))
    assert abs(slower.record.scores[0].errors["e2e"]) > 0.05
    assert slower.missed == ()
    assert len(slower.remarks) == 1
    wrong = calibrated(recorded(tmp_path / "wrong", step_log(150, 1, slower=2.2), max_num_seqs=2))
    assert wrong.missed


@pytest.mark.slow
def test_a_window_leaves_out_what_is_outside(tmp_path: Path) -> None:
    cold = recorded(tmp_path / "cold", step_log(150, 1, {0: 3_000_000.0}))
    fit = calibrated(cold, window=(0.5, 1.0))
    assert [score.window for score in fit.record.scores] == [(0.5, 1.0)]
    assert fit.rows < 0.8 * calibrated(cold).rows


@pytest.mark.parametrize("hidden", [True, False])
def test_single_steps_tell_a_roofline_from_a_line(hidden: bool) -> None:
    """5,000 steps of 20 ms and 100 us a prompt token, each off by 2 %; of the roofline 100 tokens ride under reading.

    Chunks of 1 to 512 tokens are on both sides of its knee.  Where nothing is hidden a line stays.
    """
    rng = np.random.default_rng(3)
    prefill = np.where(rng.random(5_000) < 0.5, rng.integers(1, 512, 5_000), 0).astype(np.float64)
    decodes = rng.integers(1, 30, 5_000).astype(np.float64)
    batch = np.column_stack([np.ones(5_000), prefill, decodes, 500 * decodes, np.zeros(5_000)])
    us = 20_000 + 100 * prefill + 30 * decodes
    us += Roofline(100.0, 0.8).more_us(prefill, decodes, 100.0) if hidden else 0
    found = _roofline_of(batch, us * rng.normal(1.0, 0.02, 5_000))
    assert (None if found is None else found.knee_tokens) == (100.0 if hidden else None)


@pytest.mark.parametrize("wrong", ["step_us: 0", "step_us: 1.0e-9", "by_doubling: []", "by_doubling: [-1.0]"])
def test_a_scatter_that_no_steps_have_is_refused(wrong: str) -> None:
    """A mean step of 0 us ended as a fault of the program, and one of 1e-9 us asked for 574 PiB."""
    values = {"step_us": "10000.0", "by_doubling": "[0.1]"} | dict([wrong.split(": ")])
    text = "".join(f"{name}: {value}\n" for name, value in values.items())
    with pytest.raises(ReleaseError):
        read_yaml(text, Scatter, "mine.yaml", "a scatter", ReleaseError)


def test_the_scatter_of_steps_is_told_by_how_many_of_them_it_lasts() -> None:
    """Independent steps that vary by 20 %: neighbours lie 20 % / sqrt(2) apart from their mean, pairs half as far."""
    drawn = np.random.default_rng(3)
    modelled_us = drawn.uniform(5_000, 50_000, 1 << 14)
    independent = modelled_us * (1 + 0.2 * drawn.standard_normal(len(modelled_us)))
    found = scatter_of([np.column_stack([independent, modelled_us])]).by_doubling
    assert found[0] == pytest.approx(0.2 / np.sqrt(2), rel=0.05)
    assert found[6] < found[0] / 6
    slow = modelled_us * np.where(np.arange(len(modelled_us)) < len(modelled_us) / 2, 0.8, 1.2)
    *fast, halves = scatter_of([np.column_stack([slow, modelled_us])]).by_doubling
    assert max(fast) == pytest.approx(0, abs=1e-4)
    assert halves == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("known", [True, False])
def test_drawn_steps_scatter_as_the_recorded_ones_did(known: bool) -> None:
    """Where the pace of the run is known, their mean is that of the model; else it differs from run to run."""
    scatter, model = Scatter(10_000.0, (0.1, 0.1, 0.05, 0.2, 0.05)), LatencyModel("blackbox", 10_000_000, 0, 0)
    means = []
    for seed in range(40):
        latency = scattered(model, scatter, 600_000, (seed,), known)
        assert isinstance(latency, CorrectedModel)
        from_us, times = latency.varying
        assert from_us[-1] >= 300_000
        assert np.diff(from_us) == pytest.approx(scatter.step_us * times[:-1], abs=1)
        of_one = times[:32]
        means.append(float(of_one.mean()))
        again = scatter_of([np.column_stack([of_one / of_one.mean(), np.ones(32)])]).by_doubling
        assert again[3] > 0
    assert (np.std(means) < 1e-9) == known
