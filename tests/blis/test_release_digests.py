"""The engine against every release of vLLM whose scheduler was run, by digests of what it did with many workloads."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from oracle_workloads import SERIES, named_specs
from recorded_schedules import table
from scenario import digest_of, engine_of, latency_of, served, simulated_schedule, trace_of

from blis_replay.base.engine_packs import EnginePack, choose_pack, engine_packs
from blis_replay.blis.trace import EngineConfig, RequestTrace

DIGESTS = {
    path.stem: json.loads(path.read_text("utf-8")) for path in (Path(__file__).parent / "digests").glob("*.json")
}


@cache
def named() -> dict[str, dict[str, Any]]:
    return {spec["scenario"]: spec for spec in named_specs()}


@cache
def spec_of(name: str) -> dict[str, Any]:
    """The workload of a name: ``SERIES-SEED-INDEX``, or one of the named."""
    if name in named():
        return named()[name]
    kind, seed, index = name.split("-")
    return SERIES[kind](int(seed), int(index))


def test_every_release_that_a_pack_names_has_digests() -> None:
    assert {release for pack in engine_packs() for release in pack.compared} == set(DIGESTS)


def test_the_groups_of_a_release_were_compared_where_its_pack_says_so() -> None:
    """Of the series with states every second workload has drafts beside windows instead."""
    series = {"groups": ("windows",), "states": ("states", "drafts")}
    kept = {release: {name.split("-")[0] for name in names} & set(series) for release, names in DIGESTS.items()}
    compared = {release: tuple(kind for name in sorted(of) for kind in series[name]) for release, of in kept.items()}
    said = {release: kinds for pack in engine_packs() for release, kinds in pack.grouped.items()}
    assert said == {release: kinds for release, kinds in compared.items() if kinds}


def test_the_offload_of_a_release_was_compared_where_its_pack_says_so() -> None:
    """To CPU memory, from another server, and to it."""
    said = {release for pack in engine_packs() for release in pack.offloading}
    for series in ("offload-", "remote-", "producer-"):
        assert {release for release, names in DIGESTS.items() if any(name.startswith(series) for name in names)} == said


# What one engine never asks, and what it asks only where somebody drafts, gives up, or has certain arguments.
OF_RANKS = ("dense_ranks_apart", "counts_before_step", "balancer_ties_rotate", "balancer_counts_in_flight")
OF_DRAFTS = (
    *("lookahead_at_admission", "single_tokens_padded", "drafts_cached_as_accepted", "padding_where_it_fits"),
    *("padding_without_company", "drafts_end_with_preemption", "hashes_look_ahead"),
)
OF_GROUPS = ("windows_wait_for_flight", "window_admission_bounded", "windows_free_uncached_first")
OF_PRIORITIES = ("exact_preemption_cursor", "priority_pass_outlives_preemption")
OF_OFFLOAD = ("offload_follows_requests",)
simulated: dict[tuple[str, EngineConfig], str] = {}
traces: dict[tuple[str, int], RequestTrace] = {}


def unasked(spec: dict[str, Any], engine: EngineConfig) -> tuple[str, ...]:
    """Behaviours that make no difference to a workload."""
    return (
        *OF_RANKS,
        *(() if engine.speculation else OF_DRAFTS),
        *(() if engine.kv_cache_groups else OF_GROUPS),
        *(() if engine.offloading else OF_OFFLOAD),
        *(() if engine.scheduling_policy == "priority" else OF_PRIORITIES),
        *(() if engine.async_scheduling else ("decodes_once_more",)),
        *(() if engine.long_prefill_token_threshold else ("lone_prefill_uncapped",)),
        *(() if any("abort_us" in request for request in spec["requests"]) else ("aborts_before_tokens",)),
        *(() if engine.enable_prefix_caching else ("uncached_blocks_first",)),
    )


@cache
def digest_of_engine(name: str, release: str) -> str:
    """Simulated once for all packs that do the same with this workload; ``release``: the first one of a pack."""
    spec = spec_of(name)
    engine = engine_of(spec, release)
    behaviours = replace(engine.behaviours, **dict.fromkeys(unasked(spec, engine), False))
    retention = engine.prefix_cache_retention_interval if engine.kv_cache_groups else None
    key = name, replace(engine, behaviours=behaviours, prefix_cache_retention_interval=retention)
    if key not in simulated:
        result = served(trace_for(name, engine), engine, latency_of(spec))
        simulated[key] = digest_of(simulated_schedule(result))
    return simulated[key]


def trace_for(name: str, engine: EngineConfig) -> RequestTrace:
    """The requests of a workload, made once for all packs whose keys of blocks are of the same tokens."""
    key = name, engine.hash_lookahead_tokens
    if key not in traces:
        traces[key] = trace_of(spec_of(name), engine)
    return traces[key]


@pytest.mark.slow
@pytest.mark.parametrize("pack", engine_packs(), ids=lambda pack: f"from {pack.first}")
def test_equal_to_each_release(pack: EnginePack) -> None:
    """Steps, depths, free blocks, preemptions, cache hits and every token, on all workloads of its releases."""
    different = []
    for release in pack.compared:
        assert choose_pack(release).pack is pack
        for name, kept in DIGESTS[release].items():
            equal = digest_of_engine(name, pack.compared[0]) == kept
            if equal == (f"{release} {name}" in pack.unequal):
                different.append(f"its pack says that {name} differs" if equal else how_to_see(release, name))
    assert not different, "\n".join(different)


def test_the_page_of_the_engine_has_the_table() -> None:
    """`python scripts/recorded_schedules.py table` prints it."""
    assert table() in (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text("utf-8")


def how_to_see(release: str, name: str) -> str:
    """The commands that show the first step in which engine and release differ."""
    which = f"named --only {name}"
    if name not in named():
        kind, seed, index = name.split("-")
        which = f"random --series {kind} --seed {seed} --index {int(index)}"
    return (
        f"vLLM {release} schedules {name} otherwise: with that release, python scripts/vllm_oracle.py {which} OUT; "
        f"then python scripts/recorded_schedules.py compare OUT/{name}"
    )
