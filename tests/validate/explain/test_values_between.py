"""A limit that was noted wrongly is named with its own value, which may be any, and not another limit in its place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.ingest.recording import AGGREGATE_SCHEMA, Recording, SharedPrefix, Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.inputs import to_try
from blis_replay.validate.explain.search import _depths_apart, best_input
from blis_replay.validate.explain.trial import trial_of
from blis_replay_labs.planted.causes import argument, line
from blis_replay_labs.planted.faults import LOADS, Cause, Fault, planted_case

# Of the first some 35 requests run at once, of the second several prompts of 500 to 1,600 tokens wait for a step.
QUEUES, PROMPTS = "queues", "many long prompts"


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    two, long = LOADS["two levels"], LOADS["long prompts"]
    prompts = SharedPrefix(
        num_groups=400, num_prompts_per_group=2, system_prompt_tokens=100, question_tokens=400, output_tokens=400
    )
    engine = replace(two.engine, num_gpu_blocks=26_603)
    queues = replace(two, stages=(Stage(0, 11.0, 40_000_000),), shared_prefix=prompts, engine=engine, ignore_eos=False)
    monkeypatch.setitem(LOADS, QUEUES, queues)
    monkeypatch.setitem(LOADS, PROMPTS, replace(long, stages=(Stage(0, 6.0, 60_000_000),), engine=engine))


def named(recording: Recording, release: CoefficientRelease) -> Hypothesis:
    stated = trial_of(Replayed(recording, ReplayMode(), entry_of(release, recording), release))
    assert stated is not None
    found = best_input(stated, to_try(recording, ReplayMode()))
    assert found is not None
    return found.hypothesis


@pytest.mark.parametrize(
    ("name", "server", "noted", "load", "beside"),
    [
        ("max_num_seqs", 36, 128, QUEUES, ()),
        ("max_num_seqs", 44, 256, QUEUES, ()),
        ("max_num_batched_tokens", 300, 2048, PROMPTS, ()),
        ("max_num_batched_tokens", 700, 2048, PROMPTS, ()),
        ("num_gpu_blocks", 1_500, 26_603, QUEUES, ()),
        pytest.param("max_num_seqs", 36, 128, QUEUES, (line(intercept=1.15),), marks=pytest.mark.slow),
        pytest.param("max_num_seqs", 12, 64, "bursts", (line(per_decode_token=2.0),), marks=pytest.mark.slow),
    ],
)
def test_a_value_between_those_of_the_list_is_found(
    name: str, server: int, noted: int, load: str, beside: tuple[Cause, ...]
) -> None:
    """Only what the client saw is there; ``beside``: a cost of the simulator's steps is too large as well."""
    case = planted_case(Fault("", (argument(name, server, noted), *beside), "client", load))
    found = named(case.recording, case.release)
    assert (dict(found.engine), found.also) == ({name: server}, ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "server", "noted"), [("max_num_seqs", 76, 128), ("num_gpu_blocks", 3_100, 26_603)])
def test_so_it_is_of_a_real_load_and_latencies_that_scatter(name: str, server: int, noted: int) -> None:
    """800 requests of 34b-general from its busy stage; each latency is off by 3 % at random."""
    whole = bundled_recording("20260218-150304-codellama-34b-tp2-general")
    release = load_release("h100-vllm-0.15.1")
    sent_us = pl.col("arrival_us")
    rows = whole.requests.frame()[6_000:6_800].with_columns(sent_us - sent_us.min(), request_index=pl.int_range(800))
    nothing = pl.DataFrame(schema=AGGREGATE_SCHEMA)
    part = replace(whole, requests=rows_of(rows), aggregates=nothing, stages=(), findings=())
    run = replay(with_engine(part, {name: server}, "file"), release)
    factor = np.random.default_rng(4).normal(1, 0.03, 800)
    times = {
        key: pl.Series((us * factor).astype(np.int64)) for key, us in (("ttft_us", run.ttft_us), ("e2e_us", run.e2e_us))
    }
    seen = replace(part, requests=rows_of(rows.with_columns(**times)))
    found = named(with_engine(seen, {name: noted}, "file"), release)
    assert (dict(found.engine), found.also) == ({name: server}, ())


def test_what_every_request_waits_is_no_queue() -> None:
    """A proxy adds 40 ms to a server with 4 places: the requests that decode while one waits are as many as before.

    With one bound for both sides, which the slower one set, hardly any simulated request waited.
    """
    random = np.random.default_rng(5)
    sent_us = np.cumsum(random.exponential(100_000, 400))
    first_us = sent_us + 25_000 + random.exponential(10_000, 400)
    streams_us = np.stack([sent_us, first_us, first_us + 300_000])
    later_us = streams_us + np.array([[0], [40_000], [40_000]])
    sides = (streams_us, later_us)
    apart = [_depths_apart(SimpleNamespace(streams_us=lambda one=one: (one, streams_us))) for one in sides]  # type: ignore[arg-type]
    assert [difference for difference, _ in apart] == pytest.approx([0, 0], abs=0.1)
