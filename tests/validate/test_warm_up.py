"""The first seconds of a server, seen beside a replay that has none, and replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from blis_replay.base.arrays import Int64s
from blis_replay.blis.latency.models import FirstUse
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store.file import open_store
from blis_replay.ingest.store.recordings import read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.replay.warm_up import Stalls, cold_start
from blis_replay.validate.comparison.warm_up import warm_up
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.fit.scores import first_use_of
from blis_replay.validate.judgement import remark
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.text.messages import words

MS = 1_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReplayRun:
    """A recording that ships, 240 requests."""
    with open_store(tmp_path_factory.mktemp("warm") / "store.duckdb") as store:
        recording = read_stored(store, find_experiment(store, "tiny-live-a"))
        return replay(recording, load_release("cpu-vllm-0.32.0"))


def served(run: ReplayRun, late_ms: dict[int, int]) -> ReplayRun:
    """As simulated, and each group of ten requests later by so much; all others by 1 ms."""
    frame = run.recording.requests.frame()
    late_us = np.full(len(frame), MS, np.int64)
    for group, late in late_ms.items():
        late_us[10 * group : 10 * group + 10] = late * MS
    ttft = pl.Series("ttft_us", run.ttft_us + late_us)
    e2e = pl.Series("e2e_us", run.e2e_us + late_us)
    return replace(run, recording=replace(run.recording, requests=rows_of(frame.with_columns(ttft, e2e))))


@pytest.mark.slow
def test_the_first_thirty_requests_came_late_with_a_pause_between(run: ReplayRun) -> None:
    """Groups 0 and 2 five seconds late, 1 on time: it ends with 2, and the others are 1 ms late of their p99."""
    found = warm_up(served(run, {0: 5_000, 2: 5_000}), Selection())
    assert found is not None
    assert (found.requests, found.late_us) == (30, 5_000 * MS)
    assert found.until_us == int(run.recording.requests["arrival_us"][29] - run.recording.requests["arrival_us"][0])
    p99_us = float(np.quantile(run.ttft_us[30:], 0.99))
    assert found.p99_without == pytest.approx(p99_us / (p99_us + MS) - 1)
    assert words(remark("warm_up", **vars(found))).startswith("warm-up: the first 30 requests (until second ")


@pytest.mark.parametrize("late_ms", [{}, {6: 5_000}, {0: 2}])
def test_a_stall_later_on_or_one_of_no_size_is_no_warm_up(run: ReplayRun, late_ms: dict[int, int]) -> None:
    assert warm_up(served(run, late_ms), Selection()) is None


def test_a_part_of_a_run_has_none(run: ReplayRun) -> None:
    assert warm_up(served(run, {0: 5_000}), Selection(window=(0.5, 1.0))) is None


@pytest.mark.parametrize(
    ("waits_until_ms", "ttft_ms", "stalls"),
    [
        ([2_000], 50, [(0, 1_950)]),  # of the requests that came in 2 s the first waits for a step, the others for it
        ([2_000, 3_500], 50, [(0, 1_950), (2_000, 1_450)]),  # a second batch stalls as well
        ([800], 50, []),  # a long prefill
        ([2_000], 300, []),  # less than ten times what others wait
    ],
)
def test_a_cold_start_is_seen_by_the_first_request_alone(
    waits_until_ms: list[int], ttft_ms: int, stalls: list[tuple[int, int]]
) -> None:
    """A request each 100 ms; those of the first stalls get their first tokens one batch after the other."""
    arrival_us = np.arange(0, 10_000, 100) * MS
    first_us = arrival_us + ttft_ms * MS
    for batch, until_ms in enumerate(waits_until_ms):
        first_us[batch:] = np.maximum(first_us[batch:], until_ms * MS)
    found = cold_start(pl.DataFrame({"arrival_us": arrival_us, "ttft_us": first_us - arrival_us}))
    pairs = [] if found is None else [(at // MS, us // MS) for at, us in zip(found.at_us, found.longer_us, strict=True)]
    assert pairs == stalls


def test_a_stall_in_the_middle_of_a_run_is_no_cold_start() -> None:
    arrival_us = np.arange(0, 10_000, 100) * MS
    ttft_us = np.where(np.arange(100) == 50, 3_000, 50) * MS
    assert cold_start(pl.DataFrame({"arrival_us": arrival_us, "ttft_us": ttft_us})) is None


STALLS = Stalls(np.array([0, 400_000]), np.array([1_000_000, 700_000]))


@pytest.fixture(scope="module")
def stalled(run: ReplayRun) -> ReplayRun:
    """The recording of a server that stalls twice in its first seconds, by 1 s and by 0.7 s."""
    slow = EmbeddedEngine(run.release).serve(replace(run.plan, stalls=STALLS))
    ttft, e2e = pl.Series("ttft_us", slow.ttft_us), pl.Series("e2e_us", slow.e2e_us)
    requests = rows_of(run.recording.requests.frame().with_columns(ttft, e2e))
    return replace(run, recording=replace(run.recording, requests=requests))


def test_stalls_that_first_tokens_show_are_replayed(run: ReplayRun, stalled: ReplayRun) -> None:
    """Planted: 1.7 s of stalls, after which five prompts are prefilled together, 0.2 s that count as stalled.

    So the third of 240, which is their p99, comes 11 % early; without stalls it is three times too early.
    """
    found = warm_up(stalled, Selection())
    assert found is not None
    assert found.stalled_us == pytest.approx(STALLS.longer_us.sum() + 200_000, rel=0.05)
    again = replay(stalled.recording, run.release, ReplayMode(warm_up="recorded"))
    observed = stalled.recording.requests["ttft_us"].to_numpy()
    assert np.quantile(run.ttft_us, 0.99) < 0.5 * np.quantile(observed, 0.99)
    assert np.quantile(again.ttft_us, 0.99) == pytest.approx(np.quantile(observed, 0.99), rel=0.15)
    assert again.mode.name == "warm_up=recorded"
    assert again.plan.basis["warm-up"].endswith(f"as the first tokens of the first {found.requests} requests show them")
    assert warm_up(again, Selection()) is None


def test_a_run_without_a_warm_up_is_replayed_as_it_is(run: ReplayRun) -> None:
    again = replay(run.recording, run.release, ReplayMode(warm_up="recorded"))
    assert np.array_equal(again.e2e_us, run.e2e_us)
    assert again.plan.basis["warm-up"] == "none is seen in the first tokens"


def test_stalls_are_not_laid_on_other_arrivals(stalled: ReplayRun) -> None:
    again = replay(stalled.recording, stalled.release, ReplayMode(warm_up="recorded", rate=2.0))
    assert again.plan.stalls is None
    assert again.plan.basis["warm-up"].startswith("not replayed")


@pytest.fixture(scope="module")
def knows(run: ReplayRun) -> CoefficientRelease:
    """Coefficients that know of kernels of 1 s, as of Mixtral's experts."""
    return replace(run.release, models=tuple(replace(entry, first_use=KERNELS) for entry in run.release.models))


KERNELS = FirstUse(compile_us=1_000_000, experts=8, experts_per_token=2)


def small_graphs(run: ReplayRun, ttft_us: Int64s) -> Recording:
    """The recording of a server that captured no graph of more than 8 tokens, with these first tokens."""
    frame = run.recording.requests.frame().with_columns(pl.Series("ttft_us", ttft_us))
    sizes = Setting([1, 2, 4, 8], "log")
    return replace(
        run.recording, requests=rows_of(frame), engine=run.recording.engine | {"cudagraph_capture_sizes": sizes}
    )


def test_a_server_whose_first_prompt_waits_is_new(run: ReplayRun, knows: CoefficientRelease) -> None:
    """The first prompt waits 1.2 s: kernels are compiled, the first of them for it."""
    late = run.ttft_us.copy()
    late[0] = 1_200 * MS
    found = replay(small_graphs(run, late), knows)
    assert (found.plan.first_use, found.plan.captured_tokens) == (KERNELS, 8)
    assert found.ttft_us[0] == run.ttft_us[0] + KERNELS.compile_us
    assert found.plan.basis["warm-up"] == (
        "1.00 s for each kernel that a batch is the first to need, as the server was new: "
        "the first prompt has its first token after 1.20 s"
    )


def test_a_server_whose_first_prompt_does_not_wait_has_its_kernels(run: ReplayRun, knows: CoefficientRelease) -> None:
    found = replay(small_graphs(run, run.ttft_us), knows)
    assert found.plan.first_use is None
    assert np.array_equal(found.ttft_us, run.ttft_us)
    assert found.plan.basis["warm-up"].startswith("none, as the server had compiled its kernels: ")


def test_kernels_are_left_out_when_asked(run: ReplayRun, knows: CoefficientRelease) -> None:
    late = np.full(len(run.ttft_us), 1_200 * MS)
    assert replay(small_graphs(run, late), knows, ReplayMode(warm_up="none")).plan.first_use is None


def test_the_time_of_a_kernel_is_measured_from_first_tokens() -> None:
    """Planted: 0.5 s for each kernel of Mixtral's experts, in made requests of a published run."""
    release = load_release("h100-vllm-0.15.1")
    (entry,) = (entry for entry in release.models if entry.first_use is not None)
    planted = FirstUse(compile_us=500_000, experts=8, experts_per_token=2)
    slow = replace(release, models=(replace(entry, first_use=planted),))
    served = replay(bundled_recording(bundled_aliases()["mixtral-roleplay"]), slow)
    ttft, e2e = pl.Series("ttft_us", served.ttft_us), pl.Series("e2e_us", served.e2e_us)
    recording = replace(served.recording, requests=rows_of(served.recording.requests.frame().with_columns(ttft, e2e)))
    found = first_use_of([recording], replace(entry, first_use=None), ReplayMode(scheduling="asynchronous"))
    assert found is not None
    kernels, fit = found
    assert (kernels.experts, kernels.experts_per_token) == (8, 2)
    assert kernels.compile_us == pytest.approx(500_000, rel=0.1)
    assert (fit.name, fit.status) == ("first_use", "measured")
    dense = replace(recording, model="codellama/CodeLlama-34b-Instruct-hf")
    assert first_use_of([dense], replace(entry, first_use=None), ReplayMode(scheduling="asynchronous")) is None
