"""An experiment directory becomes one recording; what it lacks is said, what is broken is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pack import h100_folders

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.clients.inference_perf import stage_of_requests
from blis_replay.ingest.readers.server.engine_settings import GivenArguments
from blis_replay.ingest.recording import AGGREGATE_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA
from blis_replay.ingest.stream import stamps_of

HEADER = "request_id,input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status"
PROFILE = {"hardware": "H100", "vllm_version": "0.15.1"}


def make(folder: Path, **files: str | bytes) -> Path:
    """An experiment directory; in names, ``__`` is a slash and ``_DOT_`` a dot."""
    directory = folder / "20260101-000000-some-7b-hf-tp1-chat"
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


TRACE = HEADER + "\nb,10,5,2000500,2010500,2100500,ok\na,11,5,1000500,1020500,1200500,ok\n"
RECORD = json.dumps(
    [
        {
            "start_time": 5.0,
            "end_time": 6.0,
            "request": '{"model": "org/m-7b", "max_tokens": 2, "ignore_eos": true}',
            "info": {"input_tokens": 3, "output_token_times": [5.5, 5.9]},
        }
    ]
)


def test_a_small_directory_has_the_schemas_of_the_store(tmp_path: Path) -> None:
    directory = make(tmp_path, exp_config_DOT_yaml="", trace_DOT_csv=TRACE)
    (directory / "exp_config.yaml").rename(directory / "exp-config.yaml").write_text(
        "model: org/m-7b\nmax_num_seqs: 4\n"
    )
    with read_recording(directory, profile=PROFILE) as recording:
        assert recording.requests.frame().schema == pl.Schema(REQUEST_SCHEMA)
        assert recording.steps.schema == STEP_SCHEMA
        assert recording.aggregates.schema == pl.Schema(AGGREGATE_SCHEMA)
        assert recording.requests["request_id"].to_list() == ["a", "b"]
        assert recording.requests["arrival_us"].to_list() == [0, 1_000_000]
        assert (recording.slug, recording.alias) == (directory.name, "7b-hf-chat")
        assert {"token times", "step records", "engine argument num_gpu_blocks"} <= set(recording.missing)
        assert recording.engine["max_num_seqs"].source == "recorded"
        assert recording.clocks[0].zero_us == 1_000_500


def test_the_clients_records_win_over_the_trace_and_the_loser_is_named(tmp_path: Path) -> None:
    directory = make(tmp_path, trace_DOT_csv=TRACE, results__per_request_lifecycle_metrics_DOT_json=RECORD)
    with read_recording(directory) as recording:
        assert recording.requests["e2e_us"].to_list() == [1_000_000]
        assert recording.requests["output_tokens_source"].to_list() == ["max_tokens with ignore_eos"]
        assert recording.token_events is not None
        events = stamps_of(recording.token_events, np.array([0]))
        assert events.rows() == [(0, 0, 500_000), (0, 1, 900_000)]
        kinds = {file.name: file.kind for file in recording.files}
        kept = recording.token_events.path
    assert "not used" in kinds["trace.csv"]
    assert not kept.exists()


def test_the_temporary_files_go_when_the_caller_fails(tmp_path: Path) -> None:
    directory = make(tmp_path, results__per_request_lifecycle_metrics_DOT_json=RECORD)
    kept: list[Path] = []
    with pytest.raises(KeyError), read_recording(directory) as recording:
        assert recording.token_events is not None
        kept.append(recording.token_events.path)
        raise KeyError
    assert not kept[0].parent.exists()


def test_equal_content_has_an_equal_hash_and_every_input_is_in_it(tmp_path: Path) -> None:
    directory = make(tmp_path, trace_DOT_csv=TRACE, trace_DOT_yaml="server: {model: m-7b}\n")

    def content_hash(profile: dict[str, object] | None = None, given: GivenArguments | None = None) -> str:
        with read_recording(directory, profile=profile, given=given) as recording:
            return recording.content_hash

    first = content_hash()
    (directory / "notes.txt").write_text("unknown files do not count")
    assert content_hash() == first
    assert (
        len(
            {
                first,
                content_hash({"hardware": "H100"}),
                content_hash(given=GivenArguments({"max_num_seqs": 3}, "engine.yaml")),
            }
        )
        == 3
    )
    (directory / "trace.csv").write_text(TRACE.replace(",ok", ",error", 1))
    assert content_hash() != first


def test_the_tensor_parallelism_that_is_given_is_that_of_the_recording(tmp_path: Path) -> None:
    """A fit to the run would be a release for one GPU."""
    directory = make(tmp_path, trace_DOT_csv=TRACE, trace_DOT_yaml="server: {model: m-7b}\n")
    with read_recording(directory, given=GivenArguments({"tensor_parallel_size": 2}, "engine.yaml")) as recording:
        assert recording.tensor_parallelism == 2


def test_unknown_files_are_listed_and_a_gzip_twin_is_not_read_twice(tmp_path: Path) -> None:
    directory = make(
        tmp_path,
        trace_DOT_csv=TRACE,
        trace_DOT_csv_DOT_gz=gzip.compress(TRACE.encode()),
        trace_DOT_yaml="server: {model: m-7b}\n",
        odd_DOT_bin=b"\0",
    )
    with read_recording(directory) as recording:
        kinds = {file.name: file.kind for file in recording.files}
        assert recording.requests.height == 2
    assert kinds["odd.bin"] == "unknown"
    assert kinds["trace.csv.gz"] == "tracev2 (not used: trace.csv is read)"


def test_aggregates_alone_are_published_aggregates(tmp_path: Path) -> None:
    report = '{"successes": {"latency": {"request_latency": {"mean": 1.5}}}}'
    directory = make(
        tmp_path, trace_DOT_yaml="server: {model: m-7b}\n", results__summary_lifecycle_metrics_DOT_json=report
    )
    with read_recording(directory) as recording:
        assert recording.ground_truth == "published aggregates"
        assert "requests" in recording.missing


def test_progress_reaches_the_size_of_every_file(tmp_path: Path) -> None:
    directory = make(tmp_path, trace_DOT_csv=TRACE, trace_DOT_yaml="server: {model: m-7b}\n")
    seen: dict[str, tuple[int, int]] = {}
    with read_recording(directory, progress=lambda name, done, total: seen.update({name: (done, total)})):
        pass
    assert seen["trace.csv"] == (len(TRACE), len(TRACE))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"notes_DOT_txt": "x"},
            r"no steps in it \(none of its files is of a known format\); a table of your own",
        ),
        (
            {"trace_DOT_yaml": "server: {model: m}\n"},
            r"no steps in it, but trace.yaml \(TraceV2 header\) was read; name with it",
        ),
        (
            {"benchmarks_DOT_yaml": "args:\n  data_column_mapper: {}\nbenchmarks:\n- config: {}\n"},
            r"no steps in it, but benchmarks.yaml \(guidellm\) was read; name with it",
        ),
        (
            {"server_DOT_log": "(APIServer pid=1) INFO x: non-default args: {'model': 'm/a', 'max_num_seqs': 32}"},
            r"no steps in it, but server.log \(server log\) was read; name with it",
        ),
        (
            {"trace_DOT_csv": TRACE, "profile_DOT_yaml": "a: [", "trace_DOT_yaml": "server: {model: m}\n"},
            "profile.yaml",
        ),
        ({"trace_DOT_csv": b"\x28\xb5\x2f\xfd", "trace_DOT_yaml": "server: {model: m}\n"}, "no header line"),
        # What was rejected is counted and located in the complaint too.
        (
            {"traces_DOT_json": b"\x00" * 100, "trace_DOT_yaml": "server: {model: m}\n"},
            r"no steps in it \(traces.json: 1 of 1 records rejected, the first at line 1: no OTLP JSON .*; repair",
        ),
        (
            {"trace_DOT_csv": TRACE.replace("0500,", "x,"), "trace_DOT_yaml": "server: {model: m}\n"},
            r"no steps in it \(trace.csv: 2 of 2 records rejected, the first at line 2: a time that is not a",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_line(tmp_path: Path, files: dict[str, str | bytes], problem: str) -> None:
    with pytest.raises(RecordingError, match=problem) as caught, read_recording(make(tmp_path, **files)):
        pass
    assert "\n" not in str(caught.value)


def test_34b_general(data_pack: Path) -> None:
    """NOTES, section 1: 4,800 + 12,000 requests, E2E 4,093 ms, TTFT 51.6 ms, 248 tokens; 26,602 usable blocks."""
    with read_recording(data_pack / "h100" / "20260218-150304-codellama-34b-tp2-general", profile=PROFILE) as recording:
        requests = recording.requests
        assert recording.alias == "34b-general"
        assert requests.frame().group_by("stage").len().sort("stage").rows() == [(0, 4800), (1, 12_000)]
        assert requests["e2e_us"].mean() == pytest.approx(4_092_531, abs=1)
        assert requests["ttft_us"].mean() == pytest.approx(51_590, abs=1)
        assert requests["output_tokens"].unique().to_list() == [248]
        assert requests["output_tokens_source"].unique().to_list() == ["configured with ignore_eos"]
        assert recording.engine["num_gpu_blocks"].value == 26_603
        assert recording.engine["async_scheduling"].value is True
        assert all(clock.constructed for clock in recording.clocks)
        assert recording.steps.height == 7441


@pytest.mark.heavy
def test_every_real_directory_is_read_without_a_rejected_record(data_pack: Path) -> None:
    """12 H100 experiments; by time the stages are what their reports count."""
    for directory in h100_folders(data_pack):
        with read_recording(directory, profile=PROFILE) as recording:
            assert sum(file.rejected_count for file in recording.files) == 0
            by_time = stage_of_requests(recording.requests["arrival_us"].to_numpy(), recording.stages, [])
            assert by_time is not None
            assert by_time.tolist() == recording.requests["stage"].to_list()


BENCH = {
    "backend": "openai",
    "model_id": "org/m-7b",
    "tokenizer_id": "x",
    "num_prompts": 3,
    "completed": 2,
    "failed": 1,
}


def test_a_benchmark_without_detail_is_an_experiment_of_aggregates(tmp_path: Path) -> None:
    """``vllm bench serve`` without --save-detailed: findings and stored, but nothing to replay."""
    document = BENCH | {"request_rate": 4.0, "duration": 5.0, "mean_e2el_ms": 500.0, "mean_itl_ms": 15.0}
    directory = make(tmp_path, result_DOT_json=json.dumps(document))
    with read_recording(directory) as recording:
        assert (recording.ground_truth, recording.requests.height) == ("published aggregates", 0)
        assert any("without --save-detailed" in line for line in recording.missing)
        assert len(recording.stages) == 1
    outcome = ingest_source(tmp_path / "s.duckdb", directory)
    assert (outcome.outcome, outcome.requests, outcome.rejected) == ("new", 0, 0)


def test_a_summary_adds_to_the_records_of_its_tool(tmp_path: Path) -> None:
    """AIPerf's records have no model and no configuration; its summary has both, the nearest to the top is taken."""
    times = {"request_start_ns": 1_770_000_000_000_000_000, "request_end_ns": 1_770_000_001_000_000_000}
    latency = {"value": 900.0, "unit": "ms"}
    record = {"metadata": {"x_request_id": "r0", **times}, "metrics": {"request_latency": latency}}
    said = {"request_throughput": {"unit": "x"}, "request_latency": {"unit": "ms", "avg": 900.0}}
    fixed = {"output_tokens": {"mean": 35, "stddev": 0}}
    configured = {
        "endpoint": {"model_names": ["org/m-7b"]},
        "input": {"extra": [["ignore_eos", True]], "prompt": fixed},
    }
    part = json.dumps(said | {"request_latency": {"unit": "ms", "avg": 1.0}})
    directory = make(
        tmp_path,
        run__profile_export_DOT_jsonl=json.dumps(record) + "\n",
        run__phases__warmup__profile_export_aiperf_DOT_json=part,
        run__profile_export_aiperf_DOT_json=json.dumps(said | {"input_config": configured, "aiperf_version": "0.6.0"}),
    )
    with read_recording(directory) as recording:
        assert recording.model == "org/m-7b"
        assert recording.requests["output_tokens"].to_list() == [35]
        assert recording.requests["output_tokens_source"].to_list() == ["configured with ignore_eos"]
        assert recording.aggregates["value"].to_list() == [900_000.0]
        assert {"aiperf", "aiperf 0.6.0"} <= {file.kind for file in recording.files}


def test_the_clients_records_of_blis_eval_win_over_the_servers_spans(data_pack: Path) -> None:
    """The folder's name says llama7b, its configuration CodeLlama-34b: the configuration is right."""
    with read_recording(data_pack / "blis-eval" / "jan20-prefill-llama7b-tp1-1") as recording:
        assert (recording.model, recording.alias) == ("codellama/CodeLlama-34b-Instruct-hf", "34b-prefillheavy")
        assert (recording.requests.height, recording.clocks[0].name, recording.clocks[0].constructed) == (
            200,
            "client",
            False,
        )
        assert recording.requests["queue_us"].count() == 197  # what the server measured of them
        assert recording.engine["num_gpu_blocks"].value == 2537
        completed = recording.requests.frame().filter(pl.col("status") == "ok")
        assert completed["output_tokens_source"].unique().to_list() == ["server usage"]
        assert recording.prefix_hit_rate == pytest.approx(0.331)
        # prefix_tokens: 1024 of 3,033 on average; all but the first request find them, which makes that rate.
        assert recording.prefix is not None
        assert recording.prefix.prompts["tokens"].to_list() == [1024]
        assert recording.prefix.requests["prompt"].to_list() == [0] * 200
