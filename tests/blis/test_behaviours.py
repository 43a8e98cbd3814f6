"""What newer releases of vLLM do otherwise: each switch shows in recorded schedules; what no server can have."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from engine_cases import ENGINE, make_trace
from scenario import first_difference, read_scenario

from blis_replay.base.engine_packs import EnginePack, engine_packs
from blis_replay.base.errors import SimulatorError, TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import RELEASE_ARGUMENTS, Behaviours, EngineConfig

TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0, 0)
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("vllm-*"))


# What shows those of data parallelism: tests/blis/test_data_parallel.py.
OF_RANKS = {"dense_ranks_apart", "counts_before_step", "balancer_ties_rotate", "balancer_counts_in_flight"}
# What shows those of speculative decoding: tests/blis/test_speculation.py.
OF_DRAFTS = {
    *("lookahead_at_admission", "drafts_cached_as_accepted"),
    *("single_tokens_padded", "padding_where_it_fits", "padding_without_company"),
    *("drafts_end_with_preemption", "hashes_look_ahead", "decodes_once_more"),
}
# What shows those of several KV-cache groups: the digests of releases (tests/blis/test_release_digests.py).
OF_GROUPS = {"windows_wait_for_flight", "window_admission_bounded", "windows_free_uncached_first"}
# What shows that of an offload: the same digests.
OF_OFFLOAD = {"offload_follows_requests"}
ELSEWHERE = OF_RANKS | OF_DRAFTS | OF_GROUPS | OF_OFFLOAD
SWITCHES = [field.name for field in fields(Behaviours) if field.name not in ELSEWHERE]


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


@pytest.mark.parametrize(("argument", "value"), [("max_num_active_seqs", 9), ("watermark", 1.0)])
def test_more_active_than_sequences_or_all_blocks_left_free_is_refused(argument: str, value: float) -> None:
    with pytest.raises(TraceError, match=argument):
        replace(ENGINE, max_num_seqs=8, **{argument: value})  # type: ignore[arg-type]


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
    assert said == since | {"decodes_once_more": "0.11.0 only", "windows_free_uncached_first": "0.23.0 only"}
    assert {field.name for field in fields(Behaviours)} | RELEASE_ARGUMENTS.keys() == said.keys()


def test_the_page_of_the_engine_says_which_releases_were_compared_with_groups() -> None:
    kinds = {"windows": "windows and chunks", "states": "states", "drafts": "n-gram drafts beside windows"}

    def words(pack: EnginePack, release: str) -> str:
        return ", ".join(kinds[kind] for kind in pack.grouped.get(release, ())) or "not compared"

    said = {release: row[1] for row in rows_of_page(2) if row[0].startswith("0.") for release in row[0].split(", ")}
    assert said == {release: words(pack, release) for pack in engine_packs() for release in pack.compared}
