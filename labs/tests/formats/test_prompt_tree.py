"""The tree of what prompts share, against a comparison of each with every one before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.readers.requests import shared_units
from blis_replay_labs.formats.arrival_traces import prompts_of_blocks

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


def leading(first: list[int], second: list[int]) -> int:
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@given(sequences=SEQUENCES)
def test_each_hangs_on_the_first_that_shares_the_most_with_it(sequences: list[list[int]]) -> None:
    counts = np.array([len(sequence) for sequence in sequences], np.int64)
    units = np.array([unit for sequence in sequences for unit in sequence], np.int64)
    parent, shared = shared_units(np.cumsum(counts) - counts, counts, units)
    for i, sequence in enumerate(sequences):
        each = [leading(sequence, before) for before in sequences[:i]]
        most = max(each, default=0)
        assert shared[i] == most
        assert parent[i] == (each.index(most) if most else -1)


@given(sequences=SEQUENCES)
def test_what_any_two_share_is_read_off_the_tree(sequences: list[list[int]]) -> None:
    """Two prompts share what both share with the prompt at which their ways up meet, here in blocks of 512 tokens."""
    counts = np.array([len(sequence) for sequence in sequences], np.int64)
    keys = np.array([unit for sequence in sequences for unit in sequence], np.int64)
    tree = prompts_of_blocks("test", 512, counts, keys).in_order(np.arange(len(counts)))
    parents, shared, tokens = (tree.prompts[name].to_list() for name in ("parent", "shared_tokens", "tokens"))
    prompt = dict(tree.requests.iter_rows())
    assert sorted(prompt) == [i for i, sequence in enumerate(sequences) if sequence]

    def way_up(at: int | None, reach: int) -> dict[int, int]:
        way = {}
        while at is not None:
            way[at] = reach
            at, reach = parents[at], min(reach, shared[at])
        return way

    for i in prompt:
        for j in prompt:
            ways = [way_up(prompt[k], tokens[prompt[k]]) for k in (i, j)]
            meeting = set(ways[0]) & set(ways[1])
            told = max((min(ways[0][at], ways[1][at]) for at in meeting), default=0)
            assert told == 512 * leading(sequences[i], sequences[j])
            assert (prompt[i] == prompt[j]) == (sequences[i] == sequences[j])


def test_a_prompt_that_ends_within_another_shares_all_of_itself() -> None:
    prompts = prompts_of_blocks("test", 16, np.array([3, 2, 3]), np.array([7, 8, 9, 7, 8, 7, 8, 9]))
    tree = prompts.in_order(np.arange(3))
    assert tree.prompts.rows() == [(0, None, 0, 48), (1, 0, 32, 32)]
    assert tree.requests.rows() == [(0, 0), (1, 1), (2, 0)]
