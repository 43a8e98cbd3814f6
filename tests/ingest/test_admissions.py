"""When requests decode, by their journeys: preemption, cancelled and incomplete journeys, and any run of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_journeys import journeys, serve, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario import intern_blocks

from blis_replay.base.errors import ReconstructionError
from blis_replay.blis.latency.models import BatchFeatures
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.admissions import admissions_of, decodes_of, open_at

Story = list[tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]]


def told(stories: dict[int, Story], prompts: dict[int, int], **engine: Any) -> Recording:
    """A recording of journeys.  A story: events ``(name, step, output tokens, finish status)``; 1 ms per step."""
    rows = []
    for journey, story in stories.items():
        for name, step, *more in story:
            row = {"journey": journey, "event": f"journey.{name}", "step_id": step, "time_us": 1000 * step}
            row["output_tokens"] = more[0] if more else 0
            row["finish_status"] = (more[1] if len(more) > 1 else "length") if name == "FINISHED" else None
            rows.append(row)
    lifecycles = [
        {"journey": journey, "core_request_id": f"r{journey}", "prompt_tokens": prompt, "max_tokens": 100}
        for journey, prompt in prompts.items()
    ]
    return journeys(rows, lifecycles=lifecycles, engine=settings_of(**{"async_scheduling": False} | engine))


def by_step(recording: Recording, steps: int) -> list[tuple[int, int, int]]:
    """Running requests, decodes and their context in steps 1, 2, ..."""
    admissions, at = admissions_of(recording), np.arange(1, steps + 1)
    start, held = (admissions.frame[name].to_numpy() for name in ("start_step", "held_until_step"))
    decodes = decodes_of(admissions)
    columns = (open_at(start, held, at), decodes.at(at), decodes.context_at(at))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_decodes_follow_the_last_chunk_of_a_prompt() -> None:
    """A: prompt 30, tokens in steps 1 to 4.  B: prompt 210 in three chunks from step 2 on, two tokens."""
    a: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 4, 4)]
    b: Story = [("SCHEDULED", 2), ("FIRST_TOKEN", 4, 1), ("FINISHED", 5, 2)]
    made = told({0: a, 1: b}, {0: 30, 1: 210})
    assert by_step(made, 5) == [(1, 0, 0), (2, 1, 31), (2, 1, 32), (2, 1, 33), (1, 1, 211)]


def test_a_preempted_request_computes_prompt_and_output_again() -> None:
    """Prompt 30; tokens in steps 1, 2, 3; preempted in step 4, resumed in 6 with 33 tokens; done with 5 in step 7."""
    story: Story = [
        *(("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("PREEMPTED", 4, 3)),
        *(("SCHEDULED", 6, 3), ("FINISHED", 7, 5)),
    ]
    made = told({0: story}, {0: 30})
    assert by_step(made, 7) == [(1, 0, 0), (1, 1, 31), (1, 1, 32), (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 1, 34)]


@pytest.mark.parametrize(
    ("status", "running", "decodes"),
    [("length", [1, 1, 1, 1], 2), ("stopped", [1, 1, 1, 1], 3), ("aborted", [1, 1, 1, 0], 2)],
)
def test_a_request_that_stops_by_itself_has_one_decode_too_many_asynchronously(
    status: str, running: list[int], decodes: int
) -> None:
    story: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 3, status)]
    found = by_step(told({0: story}, {0: 30}, async_scheduling=True), 4)
    assert ([row[0] for row in found], sum(row[1] for row in found)) == (running, decodes)


def test_a_request_given_up_in_its_prompt_and_one_given_up_in_the_queue() -> None:
    """Prompt 250: chunks in steps 1 and 2, then its client is gone.  The other was never admitted."""
    stories: dict[int, Story] = {
        0: [("SCHEDULED", 1), ("FINISHED", 2, 0, "aborted")],
        1: [("FINISHED", 2, 0, "aborted")],
    }
    made = told(stories, {0: 250, 1: 9})
    assert by_step(made, 3) == [(1, 0, 0), (1, 0, 0), (0, 0, 0)]


def test_a_journey_whose_beginning_was_dropped_counts_from_its_first_token_on() -> None:
    made = told({0: [("FIRST_TOKEN", 3, 1), ("FINISHED", 5, 3)]}, {0: 30})
    assert [row[1] for row in by_step(made, 5)] == [0, 0, 0, 1, 1]


def test_a_journey_without_an_end_counts_to_its_last_event_and_one_with_a_gap_is_left_out() -> None:
    """The second was preempted and finished without having been resumed."""
    stories: dict[int, Story] = {
        0: [("SCHEDULED", 1), ("FIRST_TOKEN", 2, 1)],
        1: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("PREEMPTED", 3, 2), ("FINISHED", 9, 5)],
    }
    frame = admissions_of(told(stories, {0: 150, 1: 20})).frame
    assert frame.select("journey", "start_step", "last_step").rows() == [(0, 1, 2)]


def test_what_journeys_do_not_tell_is_refused_in_one_line() -> None:
    """Six tokens in three steps; no journey at all."""
    drafted = told({0: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 6)]}, {0: 30})
    with pytest.raises(ReconstructionError, match=r"1 of 1 requests got more tokens .* speculative decoding"):
        decodes_of(admissions_of(drafted))
    with pytest.raises(ReconstructionError, match="no journeys were recorded"):
        decodes_of(admissions_of(told({}, {})))


def step_us(batch: BatchFeatures) -> int:
    return 900 + 20 * batch.prefill_tokens + 30 * batch.decode_tokens


ROOMY = EngineConfig(
    max_num_seqs=5,
    max_num_batched_tokens=9,
    max_model_len=64,
    async_scheduling=False,
    block_size=4,
    num_gpu_blocks=200,
    enable_prefix_caching=False,
)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 36), st.integers(1, 14)), min_size=1, max_size=16),
    st.builds(replace, st.just(ROOMY), max_num_seqs=st.integers(1, 5), async_scheduling=st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_decodes_are_those_of_the_engine(rows: list[tuple[int, int, int]], engine: EngineConfig) -> None:
    """Random requests, prompts in chunks, without preemption: requests, decodes and context of every step."""
    arrival_us, prompts, outputs = (np.array(column, np.int64) for column in zip(*sorted(rows), strict=True))
    never = np.full(len(rows), np.iinfo(np.int64).max, np.int64)
    blocks = intern_blocks([np.full(tokens, i) for i, tokens in enumerate(prompts.tolist())], 4)
    trace = RequestTrace(arrival_us, prompts, prompts, outputs, never, np.zeros(len(rows), np.int64), blocks)
    recording, truth = serve(trace, engine, step_us)
    assert by_step(recording, len(truth)) == truth
