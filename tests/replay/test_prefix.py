"""Uncached prompt tokens: by hand for small workloads, and against step records of real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recordings import make_recording

from blis_replay.ingest.recording import Recording, SharedPrefix
from blis_replay.replay.prefix import prompt_tokens
from blis_replay.replay.prefix_estimate import estimate_prefix
from blis_replay_labs.planted.servers import any_server, run_of

NOTHING_KNOWN = "no prefix information: whole prompts"


def made(prompts: list[int | None], shared: SharedPrefix | None = None, **more: Any) -> Recording:
    """Requests with these prompts, 5 tokens to each; ``cached_prompt_tokens`` is a column, the rest of the run."""
    count = len(prompts)
    columns = {"arrival_us": range(count), "prompt_tokens": prompts, "output_tokens": [5] * count}
    columns |= {name: more.pop(name) for name in ("cached_prompt_tokens",) if name in more}
    return make_recording(columns, shared_prefix=shared, **more)


@pytest.mark.parametrize(
    ("recording", "computed", "basis"),
    [
        # 2 groups of 2 prompts, system prompts of 32 tokens (2 blocks), prompts of 100.
        # Request 0 is surely the first of its group: 100.  Of the 3 others, request 1 is in its group with probability
        # 1/3: 100 - 32/3 = 89.3.  Request 2 is a first only if both before it are of the other group, C(2,2)/C(3,2) =
        # 1/3: 100 - 32*2/3 = 78.7.  Request 3 never: 68.  The second round finds 6 of 7 blocks: 100 - 96 = 4.
        (made([100] * 6, SharedPrefix(2, 2, 32, 68, 5)), [100, 89, 79, 68, 4, 4], "group membership averaged"),
        # The last token is always computed; semantics section 6: 160 tokens hit 144, 165 hit 160.
        (made([160, 165, 160, 165], SharedPrefix(1, 2, 0, 160, 5)), [160, 165, 16, 5], ""),
        # Prompts that do not take turns are not called cached.
        (made([10, 20, 30, 40, 50, 60], SharedPrefix(1, 2, 0, 160, 5)), [10, 20, 30, 40, 50, 60], NOTHING_KNOWN),
        # What the server counted comes first.
        (made([100, 100], SharedPrefix(1, 1, 0, 100, 5), cached_prompt_tokens=[0, 96]), [100, 4], ""),
        # A rate of 25 % leaves 75 of 100 tokens, for everybody.
        (made([100, 2], prefix_hit_rate=0.25), [75, 2], "not identified per request"),
        # Of 300 tokens of the first two 150 were cached, so half of the third prompt; one of four says nothing.
        (made([100, 200, 60], cached_prompt_tokens=[64, 86, None]), [36, 114, 30], "of 2 of 3 prompts"),
        (made([100, 200, 60], cached_prompt_tokens=[64, None, None]), [100, 200, 60], NOTHING_KNOWN),
    ],
)
def test_computed_prompt_tokens_and_what_they_rest_on(recording: Recording, computed: list[int], basis: str) -> None:
    estimate = estimate_prefix(recording)
    assert estimate.prefill_tokens.tolist() == computed
    assert basis in estimate.basis


@pytest.mark.parametrize(
    ("prompts", "prefix", "lost", "length"),
    [
        # Prompts of 10 and 20 tokens in turn.
        ([10, 20, 10, None, *[10, 20] * 18], SharedPrefix(1, 2, 0, 10, 5), 3, 20),
        # Without a cycle it is the median of 10, 30, 40 and 50.
        ([10, None, 30, 40, 50], None, 1, 35),
        ([10, None, 30, 40, 50], SharedPrefix(1, 3, 0, 10, 5), 1, 35),
    ],
)
def test_a_failed_request_takes_the_length_of_its_prompt(
    prompts: list[int | None], prefix: SharedPrefix | None, lost: int, length: int
) -> None:
    assert prompt_tokens(made(prompts, prefix))[lost] == length


def test_a_few_sampled_steps_are_no_cache_that_hits() -> None:
    """533 requests of 259 tokens, none cached; a tenth of the steps held 18 % fewer prefill tokens than all by chance.

    Believed, that rate makes the price of a prefill token 26 us where the server has 21.
    """
    server = replace(any_server(102, (16,), 533, "steps"), steps=0.1)
    assert estimate_prefix(run_of(server)).basis == NOTHING_KNOWN
