"""Which steps computed which request, from counts alone: by hand, and against the engine that made the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import ENGINE, logged, served, workload
from steplog import events

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.steps.followed import (
    NONE,
    SERVED_SCHEMA,
    Followed,
    followed,
    followed_log,
)

BLOCK = 16


def counts(*steps: tuple[int, int, int]) -> pl.DataFrame:
    """Steps as requests and tokens in prefill, and requests in decode."""
    frame = pl.DataFrame(steps, schema=["prefill_requests", "prefill_tokens", "decode_requests"], orient="row")
    return frame.with_columns(decode_tokens="decode_requests")


def lengths(*requests: tuple[int, int]) -> pl.DataFrame:
    """Requests in order of arrival, as prompt and output tokens."""
    rows = [
        dict.fromkeys(SERVED_SCHEMA) | {"request_index": i, "prompt_tokens": p, "output_tokens": o}
        for i, (p, o) in enumerate(requests)
    ]
    return pl.DataFrame(rows, schema=SERVED_SCHEMA, orient="row")


def follow(steps: pl.DataFrame, requests: pl.DataFrame) -> Followed:
    return followed(steps, requests, BLOCK, caching=True)


def lists(found: Followed) -> Sequence[list[int]]:
    return [values.tolist() for values in (found.admitted, found.first, found.last, found.computed)]


def test_requests_are_admitted_in_order_and_decode_a_token_per_step() -> None:
    """100 tokens alone; 60 and 30 together one step later, of which the 30 give one token and no decode."""
    steps = counts((1, 100, 0), (2, 90, 1), (0, 0, 2))
    found = follow(steps, lengths((100, 3), (60, 2), (30, 1)))
    assert lists(found) == [[0, 1, 1], [0, 1, 1], [2, 2, 1], [100, 60, 30]]
    assert (found.begin, found.end, found.why) == (0, 3, "")


def test_a_prompt_that_is_cut_goes_on_in_the_next_step() -> None:
    """300 tokens in chunks of 200 and 100; the second step has the first 40 of the next prompt, the third the rest."""
    steps = counts((1, 200, 0), (2, 140, 0), (1, 60, 1), (0, 0, 1))
    found = follow(steps, lengths((300, 2), (100, 2)))
    assert lists(found) == [[0, 1], [1, 2], [2, 3], [300, 100]]


def test_what_was_not_computed_was_found_in_whole_blocks_by_the_last() -> None:
    """Of 100 and 100 tokens 136 were computed: four blocks of 16 are missing, which the second found."""
    found = follow(counts((2, 136, 0), (0, 0, 2)), lengths((100, 2), (100, 2)))
    assert found.computed.tolist() == [100, 36]


def test_what_is_recorded_of_the_cache_is_not_guessed() -> None:
    requests = lengths((100, 2), (100, 2)).with_columns(pl.Series("cached_prompt_tokens", [64, 0]))
    assert follow(counts((2, 136, 0), (0, 0, 2)), requests).computed.tolist() == [36, 100]


def test_a_request_that_overtook_another_is_found_by_its_prompt() -> None:
    """70 tokens reached the engine a step before 101, which had arrived just before."""
    steps = counts((1, 70, 0), (1, 101, 1), (0, 0, 1))
    assert follow(steps, lengths((101, 2), (70, 2))).admitted.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("steps", "end", "why"),
    [
        (((1, 100, 0), (0, 0, 1), (0, 0, 0)), 2, "1 fewer requests in decode than have tokens to come"),
        (((1, 100, 0), (0, 0, 2), (0, 0, 2)), 1, "1 more requests in decode than are known"),
        (((1, 90, 0), (0, 0, 1), (0, 0, 1)), 0, "90 prompt tokens were computed of 1 requests that have 100"),
        (((2, 190, 0), (0, 0, 1), (0, 0, 1)), 0, "1 requests in prefill that no file records"),
    ],
    ids=["given up or preempted", "unknown decode", "another prompt", "unknown request"],
)
def test_it_ends_where_the_counts_cannot_be(steps: tuple[tuple[int, int, int], ...], end: int, why: str) -> None:
    found = follow(counts(*steps), lengths((100, 3)))
    assert (found.end, found.why) == (end, why)


def test_requests_before_the_first_that_is_known_are_passed_over() -> None:
    """Two warm-ups of 33 tokens, which no file has: the first known request has 40, alone in an empty engine."""
    warm_up = [(1, 33, 0), (0, 0, 1)] * 2
    found = follow(counts(*warm_up, (1, 40, 0), (0, 0, 1)), lengths((40, 2)))
    assert (found.begin, found.end, found.admitted.tolist(), found.why) == (4, 6, [4], "")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), asynchronous=st.booleans())
def test_the_engines_own_steps_are_found_again(seed: int, asynchronous: bool) -> None:
    engine = replace(ENGINE, async_scheduling=asynchronous, max_num_seqs=8)
    requests = workload(seed, 40)
    result, recorded = served(requests, engine), logged(requests, engine)
    log, _why = followed_log(recorded)
    assert log is not None
    found = log.walk
    assert (found.begin, found.end, found.why) == (0, recorded.iterations.height, "")
    assert found.admitted.tolist() == result.scheduled_step.tolist()
    assert found.first.tolist() == result.first_step.tolist()
    assert found.last.tolist() == result.last_step.tolist()


@pytest.mark.parametrize("name", ["A", "C"])
def test_every_admission_and_prefix_hit_of_vllm_0_32(data_pack: Path, tmp_path: Path, name: str) -> None:
    """The truth is the step log; 15 hits of 128 tokens in A, 3 of 1,408 in C, which no other file has."""
    folder = data_pack / "live-vllm-0.32" / name
    truth = {
        request.rpartition("-")[0]: (event["i"], hit)
        for event in events(folder)
        if event["e"] == "s"
        for request, hit in event["new"].items()
    }
    with read_recording(folder) as recorded:
        traced = recorded.lifecycles.frame()
        log, _why = followed_log(recorded)
        assert log is not None
        requests, found = log.served, log.walk
        ids = dict(traced.select("request_index", "api_request_id").drop_nulls().iter_rows())
    names = [ids.get(index, own) for index, own in requests.select("request_index", "request_id").iter_rows()]
    held = requests["prompt_tokens"].to_numpy() - found.computed
    assert NONE not in found.admitted
    assert {n: (int(a), int(h)) for n, a, h in zip(names, found.admitted, held, strict=True)} == truth
