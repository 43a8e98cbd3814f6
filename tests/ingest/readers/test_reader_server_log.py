"""vLLM's server log: the last start counts, literals are never evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
from growth import ONE_PASS, growth
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.log import read_server_log

START = "INFO x: non-default args: {{'model': '/m/a-7b', 'served_model_name': ['a/a-7b'], 'max_model_len': {}}}"


def recorded(folder: Path, *log_lines: str | bytes) -> RecordedFile:
    path = folder / "vllm.log"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in log_lines))
    return RecordedFile(path, path.name)


def test_kv_tokens_over_the_block_size_count_the_reserved_block(tmp_path: Path) -> None:
    """trace-formats, section 7: 44,640 tokens / 16 = 2,790 blocks in all."""
    log = read_server_log(recorded(tmp_path, "(EngineCore_DP0 pid=1) INFO GPU KV cache size: 44,640 tokens"))
    assert log.num_gpu_blocks(16) == 2790


@pytest.mark.parametrize("name", ["chunked_prefill_enabled", "enable_chunked_prefill"])
def test_the_configuration_line_names_chunked_prefill_in_two_ways(tmp_path: Path, name: str) -> None:
    """Up to 0.11 as the property of the scheduler's configuration, in the 0.15 era as the argument."""
    config = f"Initializing a V1 LLM engine (v0.15.1) with config: max_seq_len=4096, {name}=False, pooler_config=None"
    assert read_server_log(recorded(tmp_path, config)).engine == {
        "max_model_len": 4096,
        "enable_chunked_prefill": False,
    }


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ("dtype=torch.bfloat16, quantization=None, kv_cache_dtype=fp8", "bfloat16"),
        ("dtype=torch.bfloat16, quantization=fp8, kv_cache_dtype=auto", "fp8"),
        ("kv_cache_dtype=fp8", None),
    ],
)
def test_the_data_type_is_the_quantization_or_that_of_the_weights(tmp_path: Path, said: str, dtype: str | None) -> None:
    log = read_server_log(recorded(tmp_path, f"Initializing a V1 LLM engine (v0.15.1) with config: {said}"))
    assert log.engine.get("dtype") == dtype


def test_the_last_of_several_starts_counts(tmp_path: Path) -> None:
    log = read_server_log(
        recorded(
            tmp_path,
            START.format(8192),
            "GPU KV cache size: 160 tokens",
            "Prefix cache hit rate: 9.0%",
            START.format(4096),
        )
    )
    assert (log.starts, log.engine["max_model_len"], log.model) == (2, 4096, "a/a-7b")
    assert (log.kv_tokens, log.prefix_hit_rate) == (None, None)


def test_version_switches_and_hit_rate(tmp_path: Path) -> None:
    log = read_server_log(
        recorded(
            tmp_path,
            "Initializing a V1 LLM engine (v0.15.1) with config: model='/m/a', max_seq_len=4096, "
            "tensor_parallel_size=2, enable_prefix_caching=True, chunked_prefill_enabled=False",
            "Asynchronous scheduling is enabled",
            "Running: 1 reqs, Prefix cache hit rate: 33.0%",
            "Running: 1 reqs, Prefix cache hit rate: 33.1%, External prefix cache hit rate: 0.0%",
        )
    )
    assert log.version == "0.15.1"
    assert log.engine == {
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "async_scheduling": True,
    }
    assert log.prefix_hit_rate == pytest.approx(0.331)


@pytest.mark.parametrize(
    "literal",
    [
        "{__import__('os').system('false')}",
        "{'a': 1 + }",
        "{" + "(" * 5000 + "}",
        "{1, 2}",
        "{'a': " + "[" * 100_000 + "}",
    ],
)
def test_arguments_that_are_no_literal_are_rejected(tmp_path: Path, literal: str) -> None:
    file = recorded(tmp_path, f"non-default args: {literal}")
    assert read_server_log(file).engine == {}
    assert file.tally.rejected_count == 1


def test_an_empty_or_binary_log_says_nothing(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, b"\x00\xff\x1b[31m" * 100))
    assert (log.version, log.kv_tokens, log.engine) == (None, None, {})


@settings(max_examples=100, deadline=None)
@given(
    tail=st.text(max_size=60),
    head=st.sampled_from(["non-default args: {", "GPU KV cache size: ", "num_gpu_blocks is: "]),
)
def test_any_line_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, head: str, tail: str) -> None:
    file = recorded(tmp_path_factory.mktemp("any"), (head + tail + "}").encode("utf-8", "replace"))
    log = read_server_log(file)
    assert log.kv_tokens is None or log.kv_tokens > 0


def test_the_real_logs(data_pack: Path) -> None:
    """The logs of vLLM 0.11 print both forms: 40,592 tokens and 2,537 blocks of 16; 119,008 and 7,438."""
    for run, tokens, blocks in (("jan20-codellama-train-1", 40_592, 2537), ("jan21-llama7b-train-1", 119_008, 7438)):
        log = read_server_log(RecordedFile(data_pack / "blis-eval" / run / "vllm.log", "vllm.log"))
        assert (log.version, log.kv_tokens, log.num_gpu_blocks(16), log.engine["max_num_seqs"]) == (
            "0.11.0",
            tokens,
            blocks,
            256,
        )
        assert tokens // 16 == blocks


def test_a_line_of_openings_is_read_in_one_pass(tmp_path: Path) -> None:
    """A search for the closing brace from each of the 50,000 openings took 20 s for this MB."""

    def read(openings: int) -> None:
        file = recorded(tmp_path, b"non-default args: {" * openings)
        assert read_server_log(file).engine == {}
        assert file.tally.rejected == [("line 1", "the engine arguments are no Python literal")]

    assert growth(read, 12_500) < ONE_PASS


def test_what_follows_the_arguments_is_not_of_them(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, START.format(4096) + " (pid=7)"))
    assert log.engine == {"max_model_len": 4096}
