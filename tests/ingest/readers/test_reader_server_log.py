"""vLLM's server log: the last start counts, literals are never evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import recorded_file
from growth import ONE_PASS, growth
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.log import read_server_log

START = "INFO x: non-default args: {{'model': '/m/a-7b', 'served_model_name': ['a/a-7b'], 'max_model_len': {}}}"


def recorded(folder: Path, *log_lines: str | bytes) -> RecordedFile:
    return recorded_file(folder, b"\n".join(line.encode() if isinstance(line, str) else line for line in log_lines))


@pytest.mark.parametrize("name", ["chunked_prefill_enabled", "enable_chunked_prefill"])
def test_the_configuration_line_names_chunked_prefill_in_two_ways(tmp_path: Path, name: str) -> None:
    """Up to 0.11 as the property of the scheduler's configuration, in the 0.15 era as the argument."""
    config = f"Initializing a V1 LLM engine (v0.15.1) with config: max_seq_len=4096, {name}=False, pooler_config=None"
    assert read_server_log(recorded(tmp_path, config)).resolved == {
        "max_model_len": 4096,
        "enable_chunked_prefill": False,
    }


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ("dtype=torch.bfloat16, quantization=None, kv_cache_dtype=fp8", "torch.bfloat16"),
        ("dtype=torch.bfloat16, quantization=fp8, kv_cache_dtype=auto", "fp8"),
        ("kv_cache_dtype=fp8", None),
    ],
)
def test_the_data_type_is_the_quantization_or_that_of_the_weights(tmp_path: Path, said: str, dtype: str | None) -> None:
    log = read_server_log(recorded(tmp_path, f"Initializing a V1 LLM engine (v0.15.1) with config: {said}"))
    assert log.resolved.get("dtype") == dtype


WRAPPED = ("(APIServer pid=1) INFO 11-26 10:00:01 [utils.py:233] non-default args: {'model': 'codellama/Cod",)


@pytest.mark.parametrize("ending", ["", "\r"])
def test_arguments_that_a_terminal_wrapped_are_read_whole(tmp_path: Path, ending: str) -> None:
    following = ("eLlama-34b', 'max_model_len': 40", "96, 'max_num_seqs': 32}", "GPU KV cache size: 160 tokens")
    log = read_server_log(recorded(tmp_path, *(line + ending for line in (*WRAPPED, *following))))
    assert (log.model, log.given, log.cut) == (
        "codellama/CodeLlama-34b",
        {"max_model_len": 4096, "max_num_seqs": 32},
        False,
    )
    assert log.kv_tokens == 160


def test_a_line_that_was_cut_takes_nothing_from_those_behind_it(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, *WRAPPED, "INFO 11-26 [x] GPU KV cache size: 160 tokens", "}"))
    assert (log.cut, log.listed, log.given, log.kv_tokens) == (True, False, {}, 160)


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
    assert (log.starts, log.given["max_model_len"], log.model) == (2, 4096, "a/a-7b")
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
    assert log.resolved == {
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "async_scheduling": True,
    }
    assert log.prefix_hit_rate == pytest.approx(0.331)


@pytest.mark.parametrize(
    ("printed", "given"),
    [
        # As vLLM 0.28 prints nested configurations and members of enumerations.
        (
            "{'kv_events_config': KVEventsConfig(enable=True, publisher='zmq'), 'max_num_seqs': 32}",
            {"max_num_seqs": 32},
        ),
        ("{'attention_backend': <Backend.FLASHINFER: 'a.b'>, 'block_size': 64}", {"block_size": 64}),
        ("{'a': __import__('os').system('false'), 'max_num_seqs': 8}", {"max_num_seqs": 8}),
        ("{'a': 1 + , 'max_num_seqs': 8}", {"max_num_seqs": 8}),
        ("{'num_gpu_blocks_override': 24}", {"num_gpu_blocks": 24}),
        ("{'quantization': 'fp8', 'dtype': 'auto'}", {"dtype": "fp8"}),
        ("{'speculative_config': {'method': 'eagle3'}}", {"speculative_config": {"method": "eagle3"}}),
        ("{" + "(" * 5000 + "}", {}),
        ("{'a': " + "[" * 100_000 + "}", {}),
    ],
)
def test_a_value_that_cannot_be_read_costs_no_other(tmp_path: Path, printed: str, given: dict[str, object]) -> None:
    file = recorded(
        tmp_path, f"(APIServer pid=7770) INFO 11-22 08:16:59 [api_utils.py:286] non-default args: {printed}"
    )
    assert read_server_log(file).given == given
    assert file.tally.rejected_count == 0


def test_a_value_kept_as_text_is_named_and_a_line_without_an_end_is_told(tmp_path: Path) -> None:
    log = read_server_log(
        recorded(tmp_path, "non-default args: {'block_size': f(3), 'max_model_len': 8, 'max_num_seqs': 25")
    )
    assert (log.as_text, log.given, log.cut) == (
        {"block_size": "f(3)"},
        {"block_size": "f(3)", "max_model_len": 8},
        True,
    )


def test_arguments_that_are_no_mapping_are_rejected(tmp_path: Path) -> None:
    file = recorded(tmp_path, "non-default args: Namespace(max_num_seqs=3)")
    assert read_server_log(file).given == {}
    assert file.tally.rejected == [("line 1", "the engine arguments are not key: value pairs")]


RESOLVED = (
    "(EngineCore pid=10505) INFO 11-22 09:38:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='./model', speculative_config=SpeculativeConfig(method='mtp', model='m', num_spec_tokens=2), "
    "dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4, "
    "quantization=None, enforce_eager=True, kv_cache_dtype=fp8, device_config=cpu, served_model_name=org/tiny, "
    "enable_prefix_caching=False, enable_chunked_prefill=True, compilation_config={'mode': <CompilationMode.NONE: 0>, "
    "'cudagraph_mode': <CUDAGraphMode.FULL: 2>, 'cudagraph_capture_sizes': [1, 2, 4, 8], 'pass_config': {'x': True}}, "
    "kernel_config=KernelConfig(a=IrOp(rms=['native']))"
)


def test_the_engine_says_what_it_runs_with(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, RESOLVED))
    assert (log.version, log.model) == ("0.32.0", "./model")
    assert log.resolved == {
        "speculative_config": {"method": "mtp", "model": "m", "num_spec_tokens": 2},
        "dtype": "torch.bfloat16",
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "data_parallel_size": 4,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
        "device": "cpu",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "cudagraph_mode": "<CUDAGraphMode.FULL: 2>",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    }


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("Asynchronous scheduling is enabled.", True),
        ("Asynchronous scheduling is disabled.", False),
        # vllm/config/vllm.py says why it is off, and from 0.27 on nothing else.
        ("Async scheduling not supported with ngram-based speculative decoding and will be disabled.", False),
        ("Async scheduling is not yet supported with pipeline_parallel_size > 1 and will be disabled.", False),
        ("Async scheduling is disabled because the V1 model runner does not support it with pipelines.", False),
        ("Async scheduling will be disabled because it is not supported with the `ray` backend.", False),
        ("Disabling NCCL for DP synchronization when using async scheduling.", None),
    ],
)
def test_whether_scheduling_is_asynchronous(tmp_path: Path, line: str, on: bool | None) -> None:
    assert read_server_log(recorded(tmp_path, f"INFO [vllm.py:750] {line}")).resolved.get("async_scheduling") is on


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("INFO 11-27 10:00:00 [scheduler.py:2756] setting pause state to PAUSED_ALL", "PAUSED_ALL"),  # vLLM 0.32.0
        ("INFO 11-27 10:00:00 [scheduler.py:2756] setting pause state to UNPAUSED", None),
        ('INFO:     127.0.0.1:44444 - "POST /pause?mode=keep HTTP/1.1" 200 OK', "pause"),  # uvicorn, any release
        ('INFO:     127.0.0.1:44444 - "POST /sleep HTTP/1.1" 200 OK', "sleep"),
        ('INFO:     127.0.0.1:44444 - "POST /sleep HTTP/1.1" 404 Not Found', None),  # not in development mode
    ],
)
def test_a_pause_is_read(tmp_path: Path, line: str, state: str | None) -> None:
    assert read_server_log(recorded(tmp_path, f"(EngineCore pid=7) {line}")).resolved.get("pause_state") == state


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("CPU KV cache size: 65,536 tokens, Maximum concurrency for 4,096 tokens per request: 16.00x", "cpu"),
        ("GPU KV cache size: 65,536 tokens", "cuda"),
        ("XPU KV cache size: 65,536 tokens", "xpu"),
        ("GPU + host KV cache size: 65,536 tokens", "cuda"),
    ],
)
def test_the_kv_cache_of_any_device(tmp_path: Path, line: str, device: str) -> None:
    log = read_server_log(recorded(tmp_path, f"(EngineCore pid=7) INFO [kv_cache_utils.py:2327] {line}"))
    assert (log.kv_tokens, log.resolved["device"], log.num_gpu_blocks(128)) == (65_536, device, 512)


KV_TOKENS = "GPU KV cache size: 290,864 tokens"


@pytest.mark.parametrize(
    ("lines", "blocks"),
    [
        # trace-formats, section 7: 44,640 tokens / 16, the reserved block included.
        (["(EngineCore_DP0 pid=1) INFO GPU KV cache size: 44,640 tokens"], 2790),
        # vllm/v1/core/kv_cache_utils.py from 0.24 on: int(blocks / ceil(max_model_len / block) * max_model_len).
        # 1,000 blocks of 16 and requests of 1,000 tokens, 63 blocks each: int(1000 / 63 * 1000) = 15,873.
        (["Using max model len 1000", "GPU KV cache size: 15,873 tokens"], 1000),
        # A concurrency that fits the tokens.
        (["GPU KV cache size: 40,592 tokens", "Maximum concurrency for 4,096 tokens per request: 9.91x"], 2537),
        # Several kinds of KV cache; vllm-project/vllm#40691: 33.04 * 32,768 = 1,082,655.
        (
            [KV_TOKENS, "Setting attention block size to 544 tokens to ensure that attention page size is >= mamba"],
            None,
        ),
        ([KV_TOKENS, "Add 1 padding layers, may waste at most 3.45% KV cache memory"], None),
        ([KV_TOKENS, "kv cache group sizes (256, 64, 8)"], None),
        ([KV_TOKENS, "Maximum concurrency for 32,768 tokens per request: 33.04x"], None),
    ],
)
def test_the_number_of_blocks_of_16(tmp_path: Path, lines: list[str], blocks: int | None) -> None:
    log = read_server_log(recorded(tmp_path, *lines))
    assert (log.num_gpu_blocks(16), bool(log.hybrid)) == (blocks, blocks is None)


def test_the_live_logs(data_pack: Path) -> None:
    """The README of the recordings: max_num_seqs 32, max_num_batched_tokens 1024, block size 128, 512 blocks."""
    for run in ("A", "C"):
        log = read_server_log(RecordedFile(data_pack / "live-vllm-0.32" / run / "vllm.log.gz", "vllm.log.gz"))
        assert (log.version, log.num_gpu_blocks(128), log.offline, log.hybrid) == ("0.32.0", 512, False, "")
        assert log.given["max_num_seqs"] == 32
        assert (log.resolved["device"], log.resolved["max_num_batched_tokens"]) == ("cpu", 1024)


def test_an_empty_or_binary_log_says_nothing(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, b"\x00\xff\x1b[31m" * 100))
    assert (log.version, log.kv_tokens, log.given, log.resolved) == (None, None, {}, {})


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
        assert (log.version, log.kv_tokens, log.num_gpu_blocks(16), log.given["max_num_seqs"]) == (
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
        assert read_server_log(file).given == {}
        assert file.tally.rejected_count == 0

    assert growth(read, 12_500) < ONE_PASS


def test_what_follows_the_arguments_is_not_of_them(tmp_path: Path) -> None:
    log = read_server_log(recorded(tmp_path, START.format(4096) + " (pid=7)"))
    assert log.given == {"max_model_len": 4096}
