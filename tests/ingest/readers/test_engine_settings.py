"""Engine arguments: who says them wins in a fixed order, and every one names its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.engine_settings import engine_settings, profile_arguments, read_engine_file
from blis_replay.ingest.recording import Setting


def test_the_first_source_wins_and_a_contradiction_among_recorded_ones_is_told() -> None:
    settings, remarks = engine_settings(
        [
            ("file", "mine.yaml", {"max_num_seqs": 64}),
            ("recorded", "exp-config.yaml", {"max_num_seqs": 128, "max_model_len": 4096}),
            ("recorded", "server log", {"max_model_len": 8192}),
            ("profile", "bundled profile", {"max_model_len": 2048, "num_gpu_blocks": 26603}),
        ],
        "H100",
    )
    assert settings["max_num_seqs"] == Setting(64, "file", "mine.yaml")
    assert settings["max_model_len"] == Setting(4096, "recorded", "exp-config.yaml")
    assert settings["num_gpu_blocks"] == Setting(26603, "profile", "bundled profile")
    assert remarks == ("max_model_len is 4096 in exp-config.yaml (used) and 8192 in server log",)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.15.1", True), ("0.16.0", True), ("1.0", True), ("0.14.9", False), ("0.11.0", False), ("dev", False)],
)
def test_asynchronous_scheduling_is_on_by_default_from_0_15(version: str, expected: bool) -> None:
    settings, _remarks = engine_settings([("recorded", "server log", {"vllm_version": version})], None)
    assert (settings["async_scheduling"].value, settings["async_scheduling"].source) == (expected, "default")
    assert version in settings["async_scheduling"].detail


def test_without_a_version_asynchronous_scheduling_is_not_assumed_and_the_reason_is_given() -> None:
    setting = engine_settings([], None)[0]["async_scheduling"]
    assert (setting.value, setting.source) == (False, "default")
    assert "not known" in setting.detail


@pytest.mark.parametrize(
    ("hardware", "seqs", "tokens"), [("H100", 1024, 8192), ("A100-80GB", 256, 2048), (None, 256, 2048)]
)
def test_defaults_depend_on_the_gpu(hardware: str | None, seqs: int, tokens: int) -> None:
    """vllm-scheduler-semantics, section 10: 8192 and 1024 on GPUs of at least 70 GiB other than the A100."""
    settings, _remarks = engine_settings([], hardware)
    assert (settings["max_num_seqs"].value, settings["max_num_batched_tokens"].value) == (seqs, tokens)
    assert settings["block_size"].value == 16
    assert "num_gpu_blocks" not in settings


@pytest.mark.parametrize(
    ("said", "dtype"), [("torch.bfloat16", "bfloat16"), ("half", "float16"), ("FP8", "fp8"), ("float", "float32")]
)
def test_a_data_type_has_one_name(said: str, dtype: str) -> None:
    """vLLM's --dtype has two names for two of them, and its log a prefix."""
    assert engine_settings([("recorded", "exp-config.yaml", {"dtype": said})], None)[0]["dtype"].value == dtype


def test_a_data_type_chosen_by_the_server_is_not_known() -> None:
    settings, remarks = engine_settings([("recorded", "exp-config.yaml", {"dtype": "auto"})], None)
    assert "dtype" not in settings
    assert remarks == ("dtype in exp-config.yaml is not usable ('auto')",)


def test_a_recorded_value_that_is_no_count_is_passed_over_and_told() -> None:
    settings, remarks = engine_settings([("recorded", "exp-config.yaml", {"max_num_seqs": -3})], None)
    assert settings["max_num_seqs"].source == "default"
    assert remarks == ("max_num_seqs in exp-config.yaml is not usable ('-3')",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("max_seqs: 3\n", "field max_seqs"),
        ("max_num_seqs: many\n", "give a positive whole number"),
        ("async_scheduling: 1\n", "give true or false"),
        ("- 1\n", "a list where a mapping is expected"),
    ],
)
def test_an_engine_file_with_a_mistake_is_refused_with_the_field(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(content)
    with pytest.raises(RecordingError, match=problem):
        read_engine_file(RecordedFile(path, path.name))


def test_dashes_and_underscores_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("max-num-seqs: 32\n")
    assert read_engine_file(RecordedFile(path, path.name)) == {"max_num_seqs": 32}
    assert profile_arguments({"engine": {"max-num-seqs": 32}, "vllm_version": "0.15.1"}) == {
        "max_num_seqs": 32,
        "vllm_version": "0.15.1",
    }


def test_a_number_too_long_to_print_is_told_and_passed_over(tmp_path: Path) -> None:
    """Python refuses to print integers of more than 4,300 digits in decimal; YAML reads them in hexadecimal."""
    huge = "0x" + "f" * 5_000
    settings, remarks = engine_settings([("recorded", "exp-config.yaml", {"max_num_seqs": int(huge, 16)})], None)
    assert settings["max_num_seqs"].source == "default"
    assert remarks == ("max_num_seqs in exp-config.yaml is not usable (a number of thousands of digits)",)
    path = tmp_path / "engine.yaml"
    for content in (f"max_num_seqs: {huge}\n", f"? {huge}\n: 1\n"):
        path.write_text(content)
        with pytest.raises(RecordingError, match="a number of thousands of digits"):
            read_engine_file(RecordedFile(path, path.name))
