"""Engine arguments in the place of recorded ones: what a mode takes, shows, and hands to the engine."""

from __future__ import annotations

from dataclasses import fields

import pytest
from blis_runs import release_of, small_recording
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.errors import TraceError, UnknownNameError
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import Behaviours, EngineConfig
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ENGINE_ARGUMENTS, EngineValue, ReplayMode, captured_sizes, parse_mode
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.comparison.pages import provenance_of

# One other value for each argument than small_recording has.
OTHERS: dict[str, tuple[str, EngineValue]] = {
    "max_num_seqs": ("64", 64),
    "max_num_batched_tokens": ("8192", 8192),
    "max_model_len": ("5000", 5000),
    "async_scheduling": ("true", True),
    "block_size": ("32", 32),
    "num_gpu_blocks": ("700", 700),
    "enable_prefix_caching": ("false", False),
    "enable_chunked_prefill": ("false", False),
    "long_prefill_token_threshold": ("128", 128),
    "scheduling_policy": ("priority", "priority"),
    "scheduler_reserve_full_isl": ("true", True),
    "watermark": ("0.05", 0.05),
    "long_prefill_token_threshold_adaptive": ("true", True),
    "max_num_active_seqs": ("100", 100),
    "max_num_scheduled_tokens": ("1024", 1024),
    "prefill_schedule_interval": ("4", 4),
    "data_parallel_size": ("2", 2),
    "api_server_count": ("3", 3),
    "mixture_of_experts": ("true", True),
    "prefix_cache_retention_interval": ("64", 64),
}


def test_every_engine_argument_has_a_case_here() -> None:
    """What a release does goes by ``vllm_version``, KV-cache groups are the model's, captured graphs are step times."""
    others = ("behaviours", "speculation", "kv_cache_groups", "offloading")
    arguments = tuple(field.name for field in fields(EngineConfig) if field.name not in others)
    assert tuple(OTHERS) == arguments
    speculation = ("speculative_config", "speculative_acceptance", "speculative_drafted_share")
    offload = ("kv_offloading_size", "kv_offloading_costs")
    assert (*OTHERS, *speculation, *offload, "cudagraph_capture_sizes", "vllm_version") == ENGINE_ARGUMENTS


def test_speculative_decoding_is_three_arguments() -> None:
    """The drafter as the readers write it, shares of accepted drafts by position, how often anything is drafted."""
    said = "speculative_config=method=ngram num_speculative_tokens=2,speculative_acceptance=0.7 0.4"
    plan = plan_replay(small_recording(), parse_mode(said + ",speculative_drafted_share=0.5"))
    assert plan.engine.speculation == Speculation(2, "ngram", (0.7, 0.4), 0.5)
    assert plan.basis["speculative decoding"] == "2 drafts a token by ngram, accepted 70%, 40% by position, drawn"
    assert plan_replay(small_recording(), ReplayMode()).engine.speculation is None


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_reaches_the_engine_and_no_other_changes(name: str) -> None:
    text, value = OTHERS[name]
    mode = parse_mode(f"{name}={text}")
    before, after = (vars(plan_replay(small_recording(), m).engine) for m in (ReplayMode(), mode))
    assert before[name] != value
    assert after == before | {name: value}


@given(st.sets(st.sampled_from(sorted(OTHERS))), st.sampled_from(["", "prefix=none", "lengths=re-tokenised"]))
def test_the_name_of_a_mode_is_the_mode(names: set[str], other: str) -> None:
    text = ",".join([*([other] if other else []), *(f"{name}={OTHERS[name][0]}" for name in sorted(names))])
    mode = parse_mode(text or "exact")
    assert mode.name == (text or "exact")
    assert parse_mode(mode.name) == mode


def test_a_recording_is_scheduled_as_its_release_or_as_another() -> None:
    """As 0.12 where nothing is recorded; 0.32.0 admits whole prompts, and 0.999 is none that was compared."""
    recorded, newer, newest = (
        plan_replay(small_recording(), parse_mode(text))
        for text in ("exact", "vllm_version=0.32.0", "vllm_version=0.999.0")
    )
    assert recorded.engine.behaviours == Behaviours()
    assert newer.engine.scheduler_reserve_full_isl
    assert newer.engine.behaviours.uncached_blocks_first
    assert newest.engine.behaviours.priority_pass_outlives_preemption
    assert "scheduler" not in newer.basis
    assert newest.basis["scheduler"].startswith("vLLM 0.999.0 is newer than any that was compared")


def test_unbound_memory_is_none() -> None:
    assert plan_replay(small_recording(), parse_mode("num_gpu_blocks=none")).engine.num_gpu_blocks is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_num_sequences=3", "'max_num_sequences' cannot be substituted; use .* an engine argument such as"),
        ("fast", "'fast' is not a replay mode"),
        ("speed=2", "'speed' cannot be substituted; use arrivals, lengths"),
        ("arrivals=none", r"use arrivals=recorded\|flat"),
        ("watermark=much", "watermark=much is not possible; give a number such as 0.01"),
        ("cudagraph_capture_sizes=8..4/x", "give numbers of tokens such as '1 2 4 8..512/8'"),
        ("cudagraph_capture_sizes=none", "cudagraph_capture_sizes=none is not possible"),
        ("max_num_seqs=many", "max_num_seqs=many is not possible; give a whole number"),
        ("max_num_seqs=-1", "max_num_seqs=-1 is not possible"),
        ("max_num_seqs=none", "max_num_seqs=none is not possible"),
        ("max_num_seqs=" + "9" * 5000, "is not possible"),
        ("num_gpu_blocks=all", "give a whole number, 0 or more, of at most 18 digits, or none"),
        ("async_scheduling=1", r"use async_scheduling=true\|false"),
        ("scheduling=synchronous,async_scheduling=true", "are one thing; give one of them"),
    ],
)
def test_what_is_no_override_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UnknownNameError, match=complaint) as raised:
        parse_mode(text)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["block_size=0", "max_num_seqs=0", "max_num_batched_tokens=16", "num_gpu_blocks=1"])
def test_an_engine_that_cannot_be_is_said_to_be_none(text: str) -> None:
    """16 tokens a step are fewer than 128 sequences."""
    with pytest.raises(TraceError, match=text.split("=")[0]):
        plan_replay(small_recording(), parse_mode(text))


def test_provenance_says_what_was_put_in_place() -> None:
    run = replay(small_recording(), release_of(), parse_mode("max_num_seqs=64"))
    provenance = provenance_of(run)
    assert provenance["replay"] == "max_num_seqs=64"
    engine = provenance["engine"]
    assert isinstance(engine, dict)
    assert engine["max_num_seqs"] == {"value": 64, "source": "replay"}
    assert engine["block_size"] == {"value": 16, "source": "recorded"}


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ("1 2 4 8..256/8 272..512/16", (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))),
        ("[8, 4]", (4, 8)),
        ("none", ()),
        ("1..512 (67 sizes)", None),  # as earlier releases stored them: which 67 is not known
        ("8..512/0", None),
        (None, None),
    ],
)
def test_sizes_of_captured_graphs_are_read_as_they_are_written(
    written: str | None, sizes: tuple[int, ...] | None
) -> None:
    assert captured_sizes(written) == sizes
