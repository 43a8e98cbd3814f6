"""What newer releases of vLLM do otherwise: each switch by an example worked by hand, and on recorded schedules."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace
from scenario import first_difference, read_scenario

from blis_replay.base.arrays import Int64s
from blis_replay.base.engine_packs import EnginePack, engine_packs
from blis_replay.base.errors import SimulatorError, TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import RELEASE_ARGUMENTS, Behaviours, BlockKeys, EngineConfig

TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0, 0)
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("vllm-*"))


def prefill_by_step(engine: EngineConfig, prompts: list[int], outputs: list[int]) -> list[int]:
    """Prefill tokens of each step; all requests arrive at once."""
    return [int(n) for n in prefills(engine, prompts, outputs)]


def prefills(engine: EngineConfig, prompts: list[int], outputs: list[int]) -> Int64s:
    result = simulate(make_trace([0] * len(prompts), prompts, outputs), engine, TEN_MS)
    return result.steps["prefill_tokens"].astype(np.int64)


def test_a_prompt_is_admitted_only_whole() -> None:
    """9 blocks of 16. A takes 4, B's first 64 tokens take 4 more, all its 96 would take 6: it waits for A."""
    engine = replace(ENGINE, block_size=16, num_gpu_blocks=10, long_prefill_token_threshold=64)
    assert prefill_by_step(engine, [64, 96], [16, 1])[0] == 128
    # A's prefill gives its first token, and 15 decodes the others.
    whole = replace(engine, scheduler_reserve_full_isl=True)
    assert prefill_by_step(whole, [64, 96], [16, 1]) == [64, *[0] * 15, 64, 32]


def test_a_watermark_is_left_free_while_somebody_runs() -> None:
    """9 blocks: of 20 % of 10, two stay free. A takes 4, so B's 4 would leave one; it waits for A's three tokens."""
    engine = replace(ENGINE, block_size=16, num_gpu_blocks=10)
    assert prefill_by_step(engine, [60, 60], [3, 1]) == [120, 0, 0]
    assert prefill_by_step(replace(engine, watermark=0.2), [60, 60], [3, 1]) == [60, 0, 0, 60]
    # With nobody running the last block may go.
    assert prefill_by_step(replace(engine, watermark=0.2), [144], [1]) == [144]


def test_a_lone_prefill_has_no_threshold() -> None:
    """100 tokens at most a step, but 250 at once where there is one request only."""
    engine = replace(ENGINE, long_prefill_token_threshold=100, behaviours=Behaviours(lone_prefill_uncapped=True))
    assert prefill_by_step(engine, [250], [1]) == [250]
    assert prefill_by_step(engine, [250, 250], [1, 1]) == [200, 200, 100]
    assert prefill_by_step(replace(engine, behaviours=Behaviours()), [250], [1]) == [100, 100, 50]


def test_prefills_are_held_back_between_steps_that_have_some() -> None:
    """Every third step: A's prefill is in step 1, B comes during it, so its own is in step 4 and not in step 2."""
    trace = make_trace([0, 5_000], [10, 10], [6, 1])
    paced = replace(ENGINE, prefill_schedule_interval=3)
    assert simulate(trace, paced, TEN_MS).steps["prefill_tokens"].tolist() == [10, 0, 0, 10, 0, 0]
    assert simulate(trace, ENGINE, TEN_MS).steps["prefill_tokens"].tolist() == [10, 10, 0, 0, 0, 0]


def test_an_adaptive_threshold_is_a_fair_share() -> None:
    """Budget 600 and 3 requests: 200 each a step and not 100."""
    engine = replace(ENGINE, long_prefill_token_threshold=100, max_num_seqs=3, max_num_batched_tokens=600)
    adaptive = replace(engine, long_prefill_token_threshold_adaptive=True)
    assert prefill_by_step(engine, [200] * 3, [1] * 3) == [300, 300]
    assert prefill_by_step(adaptive, [200] * 3, [1] * 3) == [600]


def test_fewer_may_run_and_fewer_tokens_enter_a_step() -> None:
    """Of 8 sequences 2 may be active; of 2,048 tokens 100 enter a step."""
    engine = replace(ENGINE, max_num_seqs=8)
    assert prefill_by_step(replace(engine, max_num_active_seqs=2), [50] * 4, [1] * 4) == [100, 100]
    assert prefill_by_step(replace(engine, max_num_scheduled_tokens=100), [50] * 4, [1] * 4) == [100, 100]
    with pytest.raises(TraceError, match="max_num_active_seqs"):
        replace(engine, max_num_active_seqs=9)
    with pytest.raises(TraceError, match="watermark"):
        replace(engine, watermark=1.0)


def test_who_gives_up_during_a_step_leaves_before_its_tokens() -> None:
    """One step of 10 ms gives the only token; the client gives up at 5 ms. Before 0.13 the token came first."""
    trace = make_trace([0], [50], [1], abort_us=[5_000])
    behaviours = Behaviours(aborts_before_tokens=True)
    assert simulate(trace, ENGINE, TEN_MS).completed.tolist() == [True]
    assert simulate(trace, replace(ENGINE, behaviours=behaviours), TEN_MS).aborted.tolist() == [True]


def test_a_block_that_nobody_can_find_is_taken_first() -> None:
    """4 blocks, requests of 40, 10, 32 and the first 40 tokens again, one after the other.

    A leaves two full blocks behind the one half full and the unused; B takes the unused one. It goes behind all others,
    so that C takes A's half and A's second full one; or to the head, so that C takes it and A's half.
    """
    keys = BlockKeys(np.array([0, 0, 2, 0]), np.array([2, 0, 2, 2]), np.array([0, 1, 2, 3], np.int32), 16)
    trace = replace(make_trace([0, 50_000, 100_000, 150_000], [40, 10, 32, 40], [1] * 4), block_keys=keys)
    engine = replace(ENGINE, block_size=16, num_gpu_blocks=5)
    last = simulate(trace, engine, TEN_MS)
    first = simulate(trace, replace(engine, behaviours=Behaviours(uncached_blocks_first=True)), TEN_MS)
    assert last.cached_tokens.tolist() == [0, 0, 0, 16]
    assert first.cached_tokens.tolist() == [0, 0, 0, 32]


# What shows those of data parallelism: tests/blis/test_data_parallel.py.
OF_RANKS = {"dense_ranks_apart", "counts_before_step", "balancer_ties_rotate", "balancer_counts_in_flight"}
# What shows those of speculative decoding: tests/blis/test_speculation.py.
OF_DRAFTS = {
    *("lookahead_at_admission", "drafts_cached_as_accepted"),
    *("single_tokens_padded", "padding_where_it_fits", "padding_without_company"),
    *("drafts_end_with_preemption", "hashes_look_ahead", "decodes_once_more"),
}
# What shows those of several KV-cache groups: the digests of releases (tests/blis/test_release_digests.py).
OF_GROUPS = {"windows_wait_for_flight", "window_admission_bounded"}
SWITCHES = [field.name for field in fields(Behaviours) if field.name not in OF_RANKS | OF_DRAFTS | OF_GROUPS]


@pytest.mark.parametrize("name", [*SWITCHES, "scheduler_reserve_full_isl"])
def test_recorded_schedules_show_each_switch(name: str) -> None:
    """Schedules of 0.32.0 and 0.33.0 equal the engine (test_engine_scenarios); without a switch one does not."""
    assert any(differs_without(read_scenario(directory).engine, name, directory) for directory in SCENARIOS)


def differs_without(engine: EngineConfig, name: str, directory: Path) -> bool:
    if name == "scheduler_reserve_full_isl":
        changed = replace(engine, scheduler_reserve_full_isl=False)
    else:
        changed = replace(engine, behaviours=replace(engine.behaviours, **{name: False}))
    try:
        return first_difference(replace(read_scenario(directory), engine=changed)) is not None
    except SimulatorError:
        return True


@pytest.mark.parametrize(
    ("argument", "value", "most"),
    [
        # A log line of 34,359,738,352 tokens in blocks of 16: its extents would take 128 GiB.
        ("num_gpu_blocks", 34_359_738_352 // 16, "30000000"),
        ("block_size", 2**62, "1048576"),
        ("max_model_len", 2**63, "2147483647"),
        ("data_parallel_size", 10**9, "1024"),
    ],
)
def test_an_argument_that_no_server_has_takes_no_memory(argument: str, value: int, most: str) -> None:
    with pytest.raises(TraceError, match=f"{argument} is {value}; at most {most} can be simulated"):
        replace(ENGINE, **{argument: value})


def test_a_request_that_no_server_serves_takes_no_memory() -> None:
    """10^8 tokens took 6.6 GB; many rows as long as the longest are a table that is bounded too, and so are steps."""
    engine = replace(ENGINE, block_size=4096, max_model_len=2_100_000_000, num_gpu_blocks=26_603)
    with pytest.raises(TraceError, match="request 0: 100000005 tokens; at most 16777216 of a request"):
        simulate(make_trace([0], [5], [100_000_000]), engine, TEN_MS)
    many = replace(engine, block_size=1, max_num_seqs=100, max_num_batched_tokens=100, num_gpu_blocks=10_000_000)
    with pytest.raises(TraceError, match="take a table of 1600001000 blocks; at most 268435456 can be simulated"):
        simulate(make_trace([0], [5], [8_000_000]), many, TEN_MS)
    with pytest.raises(TraceError, match=r"request 1: output_tokens is 2\^31 or more"):
        make_trace([0, 0], [5, 5], [1, 2**31])


def rows_of_page(columns: int) -> list[list[str]]:
    """Rows of those tables on the engine's page that have this many columns, without code marks."""
    lines = (Path(__file__).parents[2] / "research" / "engine.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.replace("`", "")[1:-1].split("|")] for line in lines if line[:2] == "| "]
    return [row for row in rows if len(row) == columns]


def test_the_page_of_the_engine_has_every_behaviour_with_its_release() -> None:
    """Switches and arguments of the table against the pack that begins them; 0.11.0 ends one."""
    since: dict[str, str] = {}
    for pack in engine_packs():
        for name in (*pack.behaviours, *(RELEASE_ARGUMENTS.keys() & pack.arguments)):
            since.setdefault(name, pack.first.removesuffix(".0"))
    rows = [row for row in rows_of_page(5) if row[0] != "behaviour"]
    said = {row[3] or row[2].split(" ")[0]: row[1] for row in rows}
    assert len(said) == len(rows)
    assert said == since | {"decodes_once_more": "0.11.0 only"}
    assert {field.name for field in fields(Behaviours)} | RELEASE_ARGUMENTS.keys() == said.keys()


def test_the_page_of_the_engine_says_which_releases_were_compared_with_groups() -> None:
    kinds = {"windows": "windows and chunks", "states": "states", "drafts": "n-gram drafts beside windows"}

    def words(pack: EnginePack, release: str) -> str:
        return ", ".join(kinds[kind] for kind in pack.grouped.get(release, ())) or "not compared"

    said = {release: row[1] for row in rows_of_page(2) if row[0].startswith("0.") for release in row[0].split(", ")}
    assert said == {release: words(pack, release) for pack in engine_packs() for release in pack.compared}
