"""Configuration files: what was run, what was asked for, and broken YAML."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st
from pack import h100_folders

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.experiment_config import declared_load, read_experiment_config, read_load_config
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import LoadProfile, SharedPrefix, Stage

RESOLVED = """
data:
  type: shared_prefix
  shared_prefix: {num_groups: 10, num_prompts_per_group: 10, system_prompt_len: 100, question_len: 447, output_len: 248}
load:
  stages:
  - {rate: 8.0, duration: 600}
  - {rate: 20.0, duration: 600}
server: {model_name: org/model-34b, ignore_eos: true}
"""


def test_the_resolved_configuration_gives_stages_prefix_and_eos(tmp_path: Path) -> None:
    config = read_load_config(recorded_file(tmp_path, RESOLVED))
    assert config.stages == (Stage(0, 8.0, 600_000_000), Stage(1, 20.0, 600_000_000))
    assert config.shared_prefix == SharedPrefix(10, 10, 100, 447, 248)
    assert (config.configured_output_tokens, config.ignore_eos, config.model) == (248, True, "org/model-34b")


def test_the_newer_key_names_mean_the_same(tmp_path: Path) -> None:
    newer = RESOLVED.replace("num_groups", "num_unique_system_prompts").replace(
        "num_prompts_per_group", "num_users_per_system_prompt"
    )
    assert read_load_config(recorded_file(tmp_path, newer)).shared_prefix == SharedPrefix(10, 10, 100, 447, 248)


def test_what_is_declared_is_the_profile_and_else_the_resolved_configuration(tmp_path: Path) -> None:
    """A pause between stages that the profile leaves open is the one that the configuration resolved it to."""
    asked = (
        "data: {shared_prefix: {num_unique_system_prompts: 9, num_users_per_system_prompt: 5, system_prompt_len: 100, "
        "question_len: 447, output_len: 248, enable_multi_turn_chat: true}}\n"
        "load: {type: constant, stages: [{rate: 8, duration: 600}]}\n"
    )
    profile = read_load_config(recorded_file(tmp_path, asked))
    resolved = read_load_config(
        recorded_file(tmp_path, RESOLVED.replace("load:", "load:\n  type: poisson\n  interval: 2.5"))
    )
    stages = (Stage(0, 8.0, 600_000_000), Stage(1, 20.0, 600_000_000))
    assert declared_load(replace(profile, source="p.yaml"), resolved) == LoadProfile(
        "p.yaml", "constant", stages[:1], 2_500_000, SharedPrefix(9, 5, 100, 447, 248), multi_turn=True
    )
    nothing = read_load_config(recorded_file(tmp_path, "rate-type: sweep\n"))
    assert declared_load(nothing, resolved) == LoadProfile(
        "file", "poisson", stages, 2_500_000, SharedPrefix(10, 10, 100, 447, 248), multi_turn=False
    )
    assert declared_load(nothing, nothing) is None


def test_a_profile_of_another_load_generator_has_no_stages(tmp_path: Path) -> None:
    text = "rate-type: sweep\nmax-requests: 25\ndata: {prompt_tokens: 3500, output_tokens: 800}\n"
    config = read_load_config(recorded_file(tmp_path, text))
    assert (config.stages, config.shared_prefix, config.ignore_eos) == ((), None, None)


def test_a_stage_without_a_rate_is_rejected_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    file = recorded_file(
        tmp_path, "load: {stages: [{rate: .nan, duration: 5}, {rate: 2, duration: -1}, {rate: 2, duration: 3}]}"
    )
    assert read_load_config(file).stages == (Stage(2, 2.0, 3_000_000),)
    assert [place for place, _why in file.tally.rejected] == ["load.stages[0]", "load.stages[1]"]


def test_the_experiment_configuration_keeps_only_what_it_says(tmp_path: Path) -> None:
    config = read_experiment_config(
        recorded_file(
            tmp_path, "model: a/b-7b\ntensor_parallelism: 2\nmax_num_seqs: 128\napp: x\nhardware: H100\ndtype: half\n"
        )
    )
    assert (config.model, config.tensor_parallelism, config.app) == ("a/b-7b", 2, "x")
    assert config.hardware == "H100"
    assert dict(config.engine) == {"max_num_seqs": 128, "dtype": "float16"}


# A run of vLLM 0.19 on an RTX 4090 (casys-kaist/LLMServingSim, bench/examples); of its arguments block_size was read.
RTX_4090 = """
hardware: NVIDIA GeForce RTX 4090
engine:
  model: meta-llama/Llama-3.1-8B
  vllm-version: 0.19.0
  tensor-parallel-size: 1
  data_parallel_size: 1
  enable_expert_parallel: false
  max_num_seqs: 256
  max_num_batched_tokens: 2048
  max_model_len: 32768
  dtype: bfloat16
  kv_cache_dtype: auto
  seed: 42
  num_gpu_blocks: 2588
  num_cpu_blocks: null
  block_size: 16
  gpu_memory_utilization: 0.9
  enable_prefix_caching: true
"""


@pytest.mark.parametrize("nested", [True, False])
def test_every_engine_argument_is_taken_at_the_top_or_under_engine(tmp_path: Path, nested: bool) -> None:
    flat = RTX_4090.replace("engine:\n", "").replace("\n  ", "\n")
    config = read_experiment_config(recorded_file(tmp_path, RTX_4090 if nested else flat))
    assert config.model == "meta-llama/Llama-3.1-8B"
    assert dict(config.engine) == {
        "vllm_version": "0.19.0",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32768,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "num_gpu_blocks": 2588,
        "block_size": 16,
        "enable_prefix_caching": True,
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "max_num_batch_tokens: 7",
            "field max_num_batch_tokens: not an engine argument of vLLM 0.11 to 0.32; did you mean",
        ),
        ("modle: a/b", "field modle: not an engine argument of vLLM 0.11 to 0.32; did you mean model?"),
        ("engine: {max_num_seqs: many}", "field max_num_seqs: 'many' is not usable; give a positive whole number"),
        ("engine: {async_scheduling: 1}", "field async_scheduling: '1' is not usable; give true or false"),
        ("engine: [1]", "field engine: not key: value pairs of engine arguments"),
        ("block_size: 16\nengine: {block_size: 32}", "field block_size: given at the top and under engine"),
        ("block_size: 16\nengine: {block-size: 32}", "block_size is given twice, as '16' and '32'"),
    ],
)
def test_a_mistake_in_an_argument_is_one_line_with_the_nearest_name(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(RecordingError, match=re.escape(says)):
        read_experiment_config(recorded_file(tmp_path, content))


@pytest.mark.parametrize("content", [b"", b"- a list", b"a: [1", b"\xff\xfe\x00garbage"])
def test_broken_yaml_is_a_recording_error(tmp_path: Path, content: bytes) -> None:
    """What else is no YAML here: tests/base/test_document.py."""
    with pytest.raises(RecordingError):
        read_load_config(recorded_file(tmp_path, content))


@settings(max_examples=80, deadline=None)
@given(content=st.binary(max_size=60) | st.text("abc:-[]{}&*!<>|'\"#?%@\n 0123456789.", max_size=60))
def test_any_bytes_are_a_configuration_or_a_recording_error(
    tmp_path_factory: pytest.TempPathFactory, content: str | bytes
) -> None:
    file = recorded_file(tmp_path_factory.mktemp("any"), content)
    try:
        config = read_load_config(file)
    except RecordingError as error:
        assert "\n" not in str(error)
    else:
        assert config.stages == ()


def test_the_run_had_ten_by_ten_prompts_whatever_its_profile_asked_for(data_pack: Path) -> None:
    """trace-formats, section 4.1: builds of the time ignored the newer key names."""
    for folder in h100_folders(data_pack):
        config, profile = (
            read_load_config(RecordedFile(folder / name, name)) for name in ("results/config.yaml", "profile.yaml")
        )
        assert config.shared_prefix is not None
        assert (config.shared_prefix.num_groups, config.shared_prefix.num_prompts_per_group) == (10, 10)
        assert profile.shared_prefix is not None
        assert (profile.shared_prefix.num_groups, profile.shared_prefix.num_prompts_per_group) != (10, 10)
        assert (profile.multi_turn, config.multi_turn) == (True, False)


# YAML reads a hexadecimal integer of any length, which Python then refuses to print in decimal.
HUGE = "0x" + "f" * 5_000


@pytest.mark.parametrize("value", ["two", "-1", "0", "[1]", "1.5"])
def test_a_parallelism_that_is_none_is_rejected_and_not_guessed(tmp_path: Path, value: str) -> None:
    file = recorded_file(tmp_path, f"model: org/m-7b\ntensor_parallelism: {value}\n")
    config = read_experiment_config(file)
    assert (config.model, config.tensor_parallelism) == ("org/m-7b", None)
    ((place, reason),) = file.tally.rejected
    assert (place, "is not a positive whole number" in reason) == ("field tensor_parallelism", True)


@pytest.mark.parametrize("field", ["model", "tensor_parallelism"])
def test_a_number_that_nobody_writes_is_refused_with_its_line(tmp_path: Path, field: str) -> None:
    with pytest.raises(RecordingError, match=r"line 2: not valid YAML \(a number of more than 400 digits\)"):
        read_experiment_config(recorded_file(tmp_path, f"app: chat\n{field}: {HUGE}\n"))


def test_yaml_larger_than_any_configuration_is_refused(tmp_path: Path) -> None:
    """A number in base 60 takes the square of its length; a MB of one took a minute."""
    with pytest.raises(RecordingError, match="larger than the 262,144 bytes such a file can have"):
        read_experiment_config(recorded_file(tmp_path, "model: 1" + ":1" * 200_000))


@pytest.mark.parametrize(
    ("data", "shared"),
    [
        ("{prompt_tokens: 2048, prefix_tokens: 1024}", 1024),
        ("{prompt_tokens: 2048, prefix_tokens: 0}", 0),
        ("{prompt_tokens: 2048}", None),
        ("{prefix_tokens: 1024}", None),  # of a dataset's own prompts nothing is known
        ("{prompt_tokens: 2048, prefix_tokens: 1024, prefix_count: 4}", None),
        ("{prompt_tokens: 2048, prefix_tokens: -1}", None),
        ("org/dataset", None),
    ],
)
def test_synthetic_prompts_of_guidellm_share_their_prefix(tmp_path: Path, data: str, shared: int | None) -> None:
    assert read_load_config(recorded_file(tmp_path, f"data: {data}")).prefix_tokens == shared
