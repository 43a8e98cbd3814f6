"""Tools whose records are a table (LLMServingSim), or have no times of sending (SGLang, genai-bench).

The forms are those of ``sglang.bench_serving`` 0.5 and genai-bench 0.0.5.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from mutations import damaged, mutated

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.clients import vllm_bench
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay_labs.formats import genai_bench, llmservingsim

SIMULATED = {
    "request_id": "bench-0",
    "input_toks": 2358,
    "output_toks": 531,
    "arrival_time": 1787267980.08274,
    "queued_ts": 27536.5,
    "scheduled_ts": 27536.75,
    "first_token_ts": 27537.5,
    "last_token_ts": 27554.5,
}
META = {
    "schema_version": 1,
    "model": "meta/m-8b",
    "vllm_version": "0.19.0",
    "engine_kwargs": {"model": "meta/m-8b", "max_num_seqs": 256, "max_model_len": None, "seed": 42},
    "dataset_hash": "x",
    "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    "resolved_config": {"scheduler_config": {"policy": "fcfs", "async_scheduling": True, "max_num_seqs": 256}},
}
SGLANG = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": 4.0,
    "max_concurrency": None,
    "duration": 10.0,
    "completed": 2,
    "total_input_tokens": 200,
    "total_output_tokens": 6,
    "total_output_tokens_retokenized": 6,
    "request_throughput": 0.2,
    "mean_e2e_latency_ms": 100.0,
    "median_e2e_latency_ms": 100.0,
    "std_e2e_latency_ms": 0.0,
    "mean_ttft_ms": 50.0,
    "p99_itl_ms": 29.9,
    "input_lens": [100, 100],
    "output_lens": [3, 3],
    "ttfts": [0.05, 0.05],
    "itls": [[0.02, 0.03]] * 2,
    "generated_texts": ["secret"] * 2,
    "errors": ["", ""],
}
GENAI = {
    "aggregated_metrics": {"scenario": "D(100,100)", "num_concurrency": 1, "stats": {}},
    "individual_request_metrics": [
        {
            "ttft": 50,
            "tpot": 10,
            "e2e_latency": 850,
            "num_input_tokens": 92,
            "num_output_tokens": 81,
            "error_code": None,
        },
        {
            "ttft": 70,
            "tpot": 12,
            "e2e_latency": 950,
            "num_input_tokens": 92,
            "num_output_tokens": 81,
            "error_code": None,
        },
        {"ttft": None, "error_code": 500, "error_message": "x"},
    ],
    "_time_unit": "ms",
}
Read = Callable[[RecordedFile, Path], RequestsRead]


def read(folder: Path, reader: Read, content: object) -> tuple[RequestsRead, RecordedFile]:
    path = folder / "input.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    file = RecordedFile(path, path.name)
    return reader(file, folder / "stamps"), file


def said(found: RequestsRead) -> dict[tuple[str, str], float]:
    return {(metric, name): value for _stage, metric, name, value in found.aggregates.iter_rows()}


def test_llmservingsim_counts_from_the_engines_queue(tmp_path: Path) -> None:
    """0.25 s queued, first token after 1 s, last after 18 s; on the monotonic clock."""
    found, file = read(tmp_path, llmservingsim.read_requests, SIMULATED)
    request = found.frame.row(0, named=True)
    assert (request["queue_us"], request["ttft_us"], request["e2e_us"]) == (250_000, 1_000_000, 18_000_000)
    assert (request["prompt_tokens"], request["usage_output_tokens"], file.tally.records) == (2358, 531, 1)
    assert (found.clock_name, found.clock_kind, found.version) == ("server", "monotonic", "LLMServingSim bench")
    assert "their clocks are two, arrivals are queued_ts" in found.remarks[-1]


def test_llmservingsims_meta_says_what_served(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_text(json.dumps(META))
    header = llmservingsim.read_meta(RecordedFile(path, path.name))
    assert (header.model, header.hardware) == ("meta/m-8b", "NVIDIA GeForce RTX 4090")
    arguments = {"num_gpu_blocks": 2588, "block_size": 16, "enable_prefix_caching": True, "scheduling_policy": "fcfs"}
    arguments |= {"async_scheduling": True, "max_num_seqs": 256, "vllm_version": "0.19.0"}
    assert dict(header.engine) == arguments


def test_published_runs_have_their_published_latencies(data_pack: Path) -> None:
    """``validation/summary.txt``: TTFT mean 65,456.6 and latency mean 86,578.3 ms on the RTX 4090."""
    folder = data_pack / "llmservingsim/RTX4090/Llama-3.1-8B"
    published = (folder / "validation/summary.txt").read_text()
    with read_recording(folder / "vllm") as recording:
        means_ms = {name: recording.requests[name].mean() / 1e3 for name in ("ttft_us", "e2e_us")}  # type: ignore[operator]
        assert f"{means_ms['ttft_us']:.1f}" in published and f"{means_ms['e2e_us']:.1f}" in published
        arguments = {name: setting.value for name, setting in recording.engine.items()}
    assert (arguments["num_gpu_blocks"], arguments["max_num_seqs"], arguments["max_model_len"]) == (2588, 256, 32768)


def test_sglang_has_aggregates_and_says_what_it_lacks(tmp_path: Path) -> None:
    found, file = read(tmp_path, vllm_bench.read_sglang, SGLANG)
    assert len(found.frame) == 0
    assert said(found)["e2e", "mean"] == 100_000 and said(found)["itl_reported", "p99"] == 29_900
    assert found.lacks[0].startswith("requests: SGLang does not say when it sent them")
    assert file.tally.rejected[0] == (
        "request 0",
        "no start time (vllm writes start_times since January 2026, SGLang none), so it cannot be placed",
    )


def test_sglang_with_start_times_would_be_placed(tmp_path: Path) -> None:
    found, _file = read(tmp_path, vllm_bench.read_sglang, SGLANG | {"start_times": [5.0, 6.0]})
    assert (found.frame["ttft_us"].to_list(), found.lacks) == ([50_000] * 2, ())


@pytest.mark.parametrize(("unit", "us"), [("ms", 1e3), ("s", 1e6)])
def test_genai_bench_is_summed_up_in_its_unit(tmp_path: Path, unit: str, us: float) -> None:
    found, _file = read(tmp_path, genai_bench.read_requests, GENAI | {"_time_unit": unit})
    numbers = said(found)
    assert (numbers["ttft", "mean"], numbers["tpot_reported", "max"]) == (
        pytest.approx(60 * us),
        pytest.approx(12 * us),
    )
    assert (numbers["requests", "succeeded"], numbers["requests", "failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("recognises", "content"),
    [
        (llmservingsim.recognises, SIMULATED),
        (llmservingsim.recognises_meta, META),
        (vllm_bench.recognises_sglang, SGLANG),
        (genai_bench.recognises, GENAI),
    ],
)
def test_files_are_known_by_content(recognises: Callable[[bytes], bool], content: object) -> None:
    assert recognises(json.dumps(content).encode())
    others = (SIMULATED, META, SGLANG, GENAI)
    assert sum(recognises(json.dumps(other).encode()) for other in others) == 1


def test_a_run_without_placed_requests_is_stored_as_aggregates(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(GENAI))
    with read_recording(tmp_path / "run") as recording:
        assert (recording.ground_truth, recording.requests.height) == ("published aggregates", 0)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(document=mutated([SGLANG, GENAI, META]))
def test_mutated_files_never_break_the_readers(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    readers = (vllm_bench.read_sglang, genai_bench.read_requests, llmservingsim.read_requests)
    for part in document if isinstance(document, list) else [document]:
        for reader in readers:
            try:
                read(tmp_path_factory.mktemp("m"), reader, part)
            except RecordingError as error:
                assert "\n" not in str(error)


@settings(max_examples=40, deadline=None)
@given(content=damaged(GENAI))
def test_damaged_bytes_never_break_the_readers(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    try:
        read(tmp_path_factory.mktemp("d"), genai_bench.read_requests, content)
    except RecordingError as error:
        assert "\n" not in str(error)
