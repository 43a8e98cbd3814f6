"""Packs: which release of vLLM has which behaviours."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from blis_replay.base.engine_packs import choose_pack, engine_packs, known_release, release_numbers
from blis_replay.base.errors import TraceError
from blis_replay.blis.trace import Behaviours, EngineConfig, release_arguments


def test_every_pack_is_what_the_engine_knows() -> None:
    """Behaviours and arguments are names of its configuration, and each pack says what it was compared with."""
    switches = {field.name for field in fields(Behaviours)}
    arguments = {field.name for field in fields(EngineConfig)}
    for pack in engine_packs():
        assert set(pack.behaviours) <= switches
        assert set(pack.arguments) <= arguments
        assert len(set(pack.behaviours)) == len(pack.behaviours)
        first, *_ = compared = [release_numbers(release) for release in pack.compared]
        assert compared == sorted(compared)
        assert release_numbers(pack.first) <= first


@pytest.mark.parametrize(
    ("version", "release", "remark"),
    [
        ("0.15.1", "0.15.1", ""),
        ("v0.32.0", "0.32.0", ""),
        ("0.32.0+cpu", "0.32.0", ""),
        ("0.99.0", engine_packs()[-1].compared[-1], "vLLM 0.99.0 is newer than any that was compared"),
        ("0.8.5", engine_packs()[0].compared[0], "vLLM 0.8.5 is older than any that was compared"),
        ("0.15.9", "0.15.1", "vLLM 0.15.9 itself was not compared"),
        ("0.1.dev9+gab", engine_packs()[-1].compared[-1], "vLLM '0.1.dev9+gab' is not a known release"),
        ("nightly", engine_packs()[-1].compared[-1], "vLLM 'nightly' is not a known release"),
    ],
)
def test_a_version_has_a_pack_and_says_what_it_stands_for(version: str, release: str, remark: str) -> None:
    choice = choose_pack(version)
    assert choice.release == release
    assert choice.remark.startswith(remark)
    assert bool(choice.remark) == bool(remark)


def test_a_release_is_its_numbers_and_a_build_without_tags_tells_none() -> None:
    versions = ("0.32.0+cpu", "v0.15.1rc2.dev3+gabc", "0.1.dev9", "main", None)
    assert [known_release(v) for v in versions] == [(0, 32, 0), (0, 15, 1), None, None, None]


def test_where_nobody_gives_an_argument_the_engine_takes_what_the_oldest_releases_take() -> None:
    """``EngineConfig`` in Python and the packs say the same; what depends on the machine it asks for."""
    oldest = engine_packs()[0]
    for field in fields(EngineConfig):
        if field.name in oldest.arguments and field.default is not MISSING:
            assert field.default == oldest.value_of(field.name)


def test_what_the_engine_takes_from_a_release() -> None:
    """0.12.0: no switch; 0.32.0: whole prompts only, unless the server was told otherwise; no version: as 0.12."""
    plain = {"behaviours": Behaviours()}
    assert release_arguments({}) == plain
    assert release_arguments({"vllm_version": "0.12.0"}) == plain
    assert release_arguments({"vllm_version": "0.13.0"}) == {"behaviours": Behaviours(aborts_before_tokens=True)}
    newer = release_arguments({"vllm_version": "0.32.0"})
    assert newer["scheduler_reserve_full_isl"] is True
    assert newer["behaviours"] == Behaviours(
        aborts_before_tokens=True,
        lone_prefill_uncapped=True,
        uncached_blocks_first=True,
        exact_preemption_cursor=True,
        dense_ranks_apart=True,
        counts_before_step=True,
        balancer_ties_rotate=True,
        balancer_counts_in_flight=True,
        lookahead_at_admission=True,
        single_tokens_padded=True,
        padding_where_it_fits=True,
        padding_without_company=True,
        drafts_end_with_preemption=True,
        windows_wait_for_flight=True,
        window_admission_bounded=True,
    )
    told = release_arguments({"vllm_version": "0.32.0", "scheduler_reserve_full_isl": False, "watermark": "0.01"})
    assert (told["scheduler_reserve_full_isl"], told["watermark"]) == (False, 0.01)
    with pytest.raises(TraceError, match="watermark is 'much', and not a number"):
        release_arguments({"watermark": "much"})


def test_a_pack_names_the_arguments_that_are_not_simulated() -> None:
    """In use, or with a value; the oracle's runs of 0.11.0 and 0.12.0 show both (`research/engine.md`)."""
    given = {"speculative_config": "method=ngram", "enable_chunked_prefill": False, "scheduling_policy": "priority"}
    named = [line.split(":")[0] for line in choose_pack("0.11.0").pack.not_simulated(given)]
    assert named == ["speculative_config", "enable_chunked_prefill=False", "scheduling_policy=priority"]
    assert choose_pack("0.11.0").pack.not_simulated({"enable_chunked_prefill": True, "scheduling_policy": "fcfs"}) == []
    assert choose_pack("0.12.0").pack.not_simulated(given) == []
