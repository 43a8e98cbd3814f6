"""Engine arguments that nobody recorded: named where the replay shows that another value would change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blis_runs import release_of
from recordings import make_recording

from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.ingest.recording import ENGINE_CHECK, UNKNOWN, Finding, Recording, Setting
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import kinds_of_cache, not_simulated
from blis_replay.validate.comparison.arguments import OpenArgument, argument_remarks, open_arguments
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.verdict_text import reason
from blis_replay.validate.judgement import exit_code
from blis_replay.validate.text.messages import words

# Every step takes 10 ms, and nothing is added.
RELEASE = release_of(LatencyModel("blackbox", 10_000_000, 0, 0), Lifecycle())


def burst(count: int, prompt: int, unknown: dict[str, int | bool], **known: int | bool) -> Recording:
    """Requests that come at once, with 5 output tokens each."""
    arrivals = {"arrival_us": [0] * count, "prompt_tokens": [prompt] * count, "output_tokens": [5] * count}
    made = make_recording({**arrivals, "e2e_us": [50_000] * count, "ttft_us": [10_000] * count}, engine=dict(known))
    engine = made.engine | {name: Setting(value, UNKNOWN, "assumed") for name, value in unknown.items()}
    return replace(made, engine=engine)


def replayed(recording: Recording) -> ReplayRun:
    return replay(recording, RELEASE)


def named(recording: Recording) -> dict[str, str]:
    return {one.name: one.why for one in open_arguments(replayed(recording))}


def test_what_is_recorded_is_not_open() -> None:
    assert named(burst(3, 100, {}, num_gpu_blocks=1000)) == {}


def test_memory_without_bound_is_open_where_requests_could_have_met_its_end() -> None:
    """A server has room for one request of max_model_len, 4,096 / 16 = 256 blocks; 40 of 101 to 104 tokens need 280."""
    assert named(burst(40, 100, {})) == {"num_gpu_blocks": "unlimited KV memory; up to 280 were in use at once"}
    assert named(burst(3, 100, {})) == {}


@pytest.mark.parametrize(
    ("argument", "value", "requests", "prompt", "why"),
    [
        # 128 on a CPU (vllm/engine/arg_utils.py); none is lower.
        ("max_num_seqs", 256, 127, 10, None),
        ("max_num_seqs", 256, 128, 10, "the replay reached 128"),
        ("max_num_batched_tokens", 8192, 2, 1000, None),
        ("max_num_batched_tokens", 8192, 2, 1024, "the replay reached 2,048"),
    ],
)
def test_a_limit_is_open_from_the_least_default_on(
    argument: str, value: int, requests: int, prompt: int, why: str | None
) -> None:
    assert named(burst(requests, prompt, {argument: value}, num_gpu_blocks=10_000)).get(argument) == why


def test_asynchronous_scheduling_is_always_open() -> None:
    assert named(burst(1, 10, {"async_scheduling": True}, num_gpu_blocks=100)) == {
        "async_scheduling": "it governs every step"
    }


def test_the_block_size_is_open_where_memory_is_scarce() -> None:
    """Three requests of 104 tokens hold 21 blocks of 16: more than half of 40, less than half of 400."""
    assert named(burst(3, 100, {"block_size": 16}, num_gpu_blocks=400)) == {}
    assert named(burst(3, 100, {"block_size": 16}, num_gpu_blocks=40)) == {
        "block_size": "more than half of the KV blocks were in use"
    }


def test_the_release_that_stands_for_a_newer_one_has_a_line() -> None:
    """As the reader of engine arguments writes it down."""
    newer = Finding(
        ENGINE_CHECK, "note", "", "vLLM 0.99.0 is newer than any: scheduled as 0.33.0", {"scheduled_as": "0.33.0"}
    )
    recording = replace(burst(1, 10, {}), findings=(newer,))
    assert [words(r) for r in argument_remarks(recording, ())] == [
        "scheduler: vLLM 0.99.0 is newer than any: scheduled as 0.33.0"
    ]


def test_a_line_for_what_is_open_and_one_for_each_contradiction() -> None:
    clash = Finding(
        ENGINE_CHECK, "note", "", "max_num_seqs is 32 in a (used) and 64 in b", {"used": "32", "also": "64"}
    )
    recording = replace(burst(1, 10, {}), findings=(clash,))
    found = (
        OpenArgument("num_gpu_blocks", None, "unlimited KV memory"),
        OpenArgument("async_scheduling", True, "it governs every step"),
    )
    assert [words(r) for r in argument_remarks(recording, found)] == [
        "not recorded: num_gpu_blocks (unlimited KV memory), async_scheduling (true assumed; it governs every step); "
        "give what you know with `blis-replay ingest --engine FILE`",
        "sources disagree: max_num_seqs is 32 in a (used) and 64 in b",
    ]
    assert argument_remarks(replace(recording, findings=()), ()) == []


def test_arguments_that_no_simulator_has_are_named_where_they_do_something() -> None:
    engine = {"pipeline_parallel_size": Setting(4, "recorded"), "decode_context_parallel_size": Setting(1, "recorded")}
    recording = replace(burst(1, 10, {}), engine=burst(1, 10, {}).engine | engine)
    sentences = ("pipeline_parallel_size 4; in the replay one batch at a time passes through all stages",)
    assert not_simulated({name: setting.value for name, setting in engine.items()}) == sentences
    assert replayed(recording).not_simulated == sentences


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("speculative_config", "method=ngram num_speculative_tokens=3"),
        ("kv_transfer_config", "kv_connector=NixlConnector"),
        ("enable_lora", True),
        ("request_features", "n, prompt_logprobs"),
        ("pause_state", "PAUSED_ALL"),
    ],
)
def test_a_recording_that_used_what_is_not_simulated_is_not_judged(argument: str, value: int | bool | str) -> None:
    """A perfect replay as well: its numbers are those of another server."""
    recording = burst(1, 10, {})
    recording = replace(recording, engine=recording.engine | {argument: Setting(value, "recorded")})
    comparison = compare_replay(replayed(recording))
    assert comparison.verdict == "NOT JUDGED"
    assert exit_code([comparison.verdict]) == 4
    assert reason(comparison.judgement).startswith(f"not simulated: {argument} {value}")


@pytest.mark.parametrize(
    ("blocks", "judged"),
    [(300, False), (1000, True)],
)
def test_several_kinds_of_kv_cache_are_refused_where_memory_is_short(blocks: int, judged: bool) -> None:
    """20 requests of 7 blocks are 140 at once, and each of four groups has its own: 560 of 1,000 are enough."""
    made = burst(20, 100, {}, num_gpu_blocks=blocks)
    run = replayed(replace(made, engine=made.engine | {"kv_cache_groups": Setting("4", "recorded")}))
    assert [what.split(" ")[0] for what in run.not_simulated] == ([] if judged else ["kv_cache_groups"])
    assert run.basis["kinds of KV cache"].startswith("4;")


def test_the_name_of_a_model_tells_several_kinds_of_kv_cache() -> None:
    """A log of gpt-oss was read without a word about its sliding windows.  Gemma of 2B is of the first kind."""
    made = burst(20, 100, {}, num_gpu_blocks=100)
    with_windows = ("openai/gpt-oss-120b", "google/gemma-2-9b-it", "google/gemma-3n-E4B", "gemma3")
    plain = ("meta-llama/Llama-3.1-8B", "google/gemma-2b", "google/gemma-7b")
    for model, several in [*((name, True) for name in with_windows), *((name, False) for name in plain)]:
        assert (kinds_of_cache(replace(made, model=model)) is not None) == several
