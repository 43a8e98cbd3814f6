"""Uncached prompt tokens: by hand for small workloads, and against step records of real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from recordings import make_recording

from blis_replay.ingest.recording import SharedPrefix
from blis_replay.replay.prefix import prompt_tokens
from blis_replay.replay.prefix_estimate import estimate_prefix
from blis_replay_labs.planted.servers import any_server, run_of


def test_a_shared_prefix_workload_by_hand() -> None:
    """2 groups of 2 prompts, system prompts of 32 tokens (2 blocks), prompts of 100.

    Request 0 is surely the first of its group: 100.  Of the 3 others, request 1 is in
    its group with probability 1/3: 100 - 32/3 = 89.3.  Request 2 is a first only if both
    before it are of the other group, C(2,2)/C(3,2) = 1/3: 100 - 32*2/3 = 78.7.  Request 3
    never: 68.  The second round finds 6 of 7 blocks: 100 - 96 = 4.
    """
    recording = make_recording(
        {"arrival_us": range(6), "prompt_tokens": [100] * 6, "output_tokens": [5] * 6},
        shared_prefix=SharedPrefix(2, 2, 32, 68, 5),
    )
    estimate = estimate_prefix(recording)
    assert estimate.prefill_tokens.tolist() == [100, 89, 79, 68, 4, 4]
    assert "group membership averaged" in estimate.basis


def test_the_last_token_is_always_computed() -> None:
    """Semantics section 6: 160 tokens hit 144 and compute 16, 165 hit 160 and compute 5."""
    recording = make_recording(
        {"arrival_us": range(4), "prompt_tokens": [160, 165, 160, 165], "output_tokens": [5] * 4},
        shared_prefix=SharedPrefix(1, 2, 0, 160, 5),
    )
    assert estimate_prefix(recording).prefill_tokens.tolist() == [160, 165, 16, 5]


def test_prompts_that_do_not_cycle_are_not_called_cached() -> None:
    recording = make_recording(
        {"arrival_us": range(6), "prompt_tokens": [10, 20, 30, 40, 50, 60], "output_tokens": [5] * 6},
        shared_prefix=SharedPrefix(1, 2, 0, 160, 5),
    )
    estimate = estimate_prefix(recording)
    assert estimate.prefill_tokens.tolist() == [10, 20, 30, 40, 50, 60]
    assert estimate.basis == "no prefix information: whole prompts"


def test_what_the_server_counted_comes_first() -> None:
    recording = make_recording(
        {"arrival_us": [0, 1], "prompt_tokens": [100, 100], "output_tokens": [5, 5], "cached_prompt_tokens": [0, 96]},
        shared_prefix=SharedPrefix(1, 1, 0, 100, 5),
    )
    assert estimate_prefix(recording).prefill_tokens.tolist() == [100, 4]


def test_an_aggregate_hit_rate_is_named_as_one() -> None:
    """A rate of 25 % leaves 75 of 100 tokens, for everybody."""
    recording = make_recording(
        {"arrival_us": [0, 1], "prompt_tokens": [100, 2], "output_tokens": [5, 5]}, prefix_hit_rate=0.25
    )
    estimate = estimate_prefix(recording)
    assert estimate.prefill_tokens.tolist() == [75, 2]
    assert "not identified per request" in estimate.basis


def test_hits_that_the_server_reported_of_some_stand_for_the_others() -> None:
    """Of 300 tokens of the first two 150 were cached, so half of the third prompt; one of four says nothing."""
    lengths = {"arrival_us": range(3), "prompt_tokens": [100, 200, 60], "output_tokens": [5] * 3}
    recording = make_recording({**lengths, "cached_prompt_tokens": [64, 86, None]})
    estimate = estimate_prefix(recording)
    assert estimate.prefill_tokens.tolist() == [36, 114, 30]
    assert estimate.basis.startswith("of 2 of 3 prompts")
    recording = make_recording({**lengths, "cached_prompt_tokens": [64, None, None]})
    assert estimate_prefix(recording).basis == "no prefix information: whole prompts"


def test_a_failed_request_takes_the_length_of_its_prompt() -> None:
    """Prompts of 10 and 20 tokens in turn; request 3 failed and lost its length."""
    recording = make_recording(
        {"arrival_us": range(40), "prompt_tokens": [10, 20, 10, None, *[10, 20] * 18], "output_tokens": [5] * 40},
        shared_prefix=SharedPrefix(1, 2, 0, 10, 5),
    )
    assert prompt_tokens(recording)[:4].tolist() == [10, 20, 10, 20]


@pytest.mark.parametrize("period", [0, 3])
def test_without_a_cycle_a_lost_length_is_the_median(period: int) -> None:
    prefix = SharedPrefix(1, period, 0, 10, 5) if period else None
    recording = make_recording(
        {"arrival_us": range(5), "prompt_tokens": [10, None, 30, 40, 50], "output_tokens": [5] * 5},
        shared_prefix=prefix,
    )
    assert prompt_tokens(recording)[1] == np.median([10, 30, 40, 50])


def test_a_few_sampled_steps_are_no_cache_that_hits() -> None:
    """533 requests of 259 tokens, none cached; a tenth of the steps held 18 % fewer prefill tokens than all by chance.

    Believed, that rate makes the price of a prefill token 26 us where the server has 21.
    """
    server = replace(any_server(102, (16,), 533, "steps"), steps=0.1)
    assert estimate_prefix(run_of(server)).basis == "no prefix information: whole prompts"
