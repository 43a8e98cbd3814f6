"""The kernel against a slow reference, and what must hold for every run."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from blis_replay.blis.latency import LatencyModel
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

request_lists = st.lists(
    st.tuples(
        st.integers(0, 30_000),  # arrival
        st.integers(1, 300),  # prompt
        st.integers(1, 300),  # of which uncached, at most
        st.integers(1, 12),  # output
        st.one_of(st.none(), st.integers(0, 40_000)),  # gives up after
    ),
    max_size=25,
)
engines = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 128),
    max_model_len=st.just(1000),
    async_scheduling=st.booleans(),
)
models = st.builds(
    LatencyModel,
    kind=st.sampled_from(["blackbox", "floor"]),
    intercept_ns=st.integers(0, 3_000_000),
    per_prefill_token_ns=st.integers(0, 40_000),
    per_decode_token_ns=st.integers(0, 90_000),
    per_context_token_ns=st.integers(0, 900),
    floor_ns=st.integers(0, 2_000_000),
    rounding=st.sampled_from(["round_half_up", "truncate"]),
)
Rows = list[tuple[int, int, int, int, int | None]]


def trace_of(rows: Rows) -> RequestTrace:
    rows = sorted(rows, key=lambda row: row[0])
    columns = [
        [a for a, *_ in rows],
        [p for _, p, *_ in rows],
        [min(p, u) for _, p, u, *_ in rows],
        [o for _, _, _, o, _ in rows],
        [NEVER_US if give_up is None else a + give_up for a, _, _, _, give_up in rows],
    ]
    return RequestTrace(*(np.array(column, np.int64) for column in columns))
