"""Small sound inputs to begin with, a list for each target; they are those of the readers' own tests."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterable

import polars as pl
import pyarrow.parquet as pq
import test_otlp_journeys
import test_otlp_scan
import test_otlp_scan_protobuf
import test_reader_aiperf
import test_reader_forward_passes
import test_reader_guidellm
import test_reader_inference_perf_requests
import test_reader_kv_events
import test_reader_metrics
import test_reader_mooncake
import test_reader_other_tools
import test_reader_otlp_json
import test_reader_tracev2
import test_reader_vllm_bench
import zstandard
from test_reader_parquet_requests import PLAIN

from blis_replay.fixtures.writers_otlp import as_protobuf
from blis_replay.ingest.readers.tables.parquet_requests import METADATA


def _lines(records: Iterable[object]) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


def _journeys() -> bytes:
    spans = [*test_otlp_journeys.whole(1), *test_otlp_journeys.whole(2, 100)]
    return _lines(test_reader_otlp_json.traces(scope, span) for scope, span in spans)


def otlp_json() -> list[bytes]:
    steps = [test_reader_otlp_json.step_line(1, 2, 5).encode(), test_reader_otlp_json.step_line(9, dropped=3).encode()]
    drawn = [test_otlp_scan.document(random.Random(seed)) for seed in range(12)]  # noqa: S311 - the same every time
    return [*steps, test_reader_otlp_json.request_line(3).encode(), _journeys(), *drawn]


def otlp_messages() -> list[bytes]:
    return [line for content in otlp_json() for line in content.splitlines() if len(line) > 30]


def otlp_protobuf() -> list[bytes]:
    lines = [line for content in otlp_json()[:4] for line in content.splitlines()]
    return [as_protobuf(json.loads(line)) for line in lines]


def scanned_protobuf() -> list[bytes]:
    drawn = [test_otlp_scan_protobuf.message(random.Random(seed)) for seed in range(12)]  # noqa: S311
    return [*otlp_protobuf(), *drawn]


def otlp_framing() -> list[bytes]:
    messages, text = otlp_protobuf(), otlp_json()[3]
    squeeze = zstandard.ZstdCompressor(level=1)
    packed = [squeeze.compress(message) for message in messages]
    framed = [b"".join(len(part).to_bytes(4, "big") + part for part in parts) for parts in (messages, packed)]
    array = json.dumps([json.loads(line) for line in text.splitlines()]).encode()
    spread = json.dumps(json.loads(otlp_json()[0]), indent=2).encode()
    return [
        *framed,
        messages[0],
        messages[0] + messages[1],
        text,
        array,
        spread,
        gzip.compress(text),
        squeeze.compress(text),
    ]


def lifecycle_records() -> list[bytes]:
    return [test_reader_inference_perf_requests.document(random.Random(seed)) for seed in range(12)]  # noqa: S311


def server_log() -> list[bytes]:
    return [
        b"INFO vLLM API server version 0.15.1\n"
        b"INFO non-default args: {'model': '/m/a-7b', 'served_model_name': ['a/a-7b'], 'max_model_len': 4096}\n"
        b"INFO Initializing a V1 LLM engine (v0.15.1) with config: model='/m/a', max_seq_len=4096, "
        b"tensor_parallel_size=2, enable_prefix_caching=True, chunked_prefill_enabled=False\n"
        b"INFO GPU KV cache size: 44,640 tokens\nnum_gpu_blocks is: 2790\n"
        b"Chunked prefill is enabled with max_num_batched_tokens=2048.\nAsynchronous scheduling is enabled\n"
        b"Running: 1 reqs, Prefix cache hit rate: 33.1%\n",
        b"(APIServer pid=7) INFO 11-22 09:38:41 [api_utils.py:286] non-default args: {'model_tag': 'm', "
        b"'max_num_seqs': 32, "
        b"'kv_events_config': KVEventsConfig(enable=True, topic='it\\'s', replay=None), 'num_gpu_blocks_override': 24, "
        b"'attention_backend': <Backend.FLASHINFER: 'a.b'>, 'speculative_config': {'method': 'mtp', 'n': (1, 2.5)}}\n"
        b"(EngineCore pid=8) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./m', "
        b"dtype=torch.bfloat16, max_seq_len=4096, data_parallel_size=2, quantization=None, device_config=cpu, "
        b"compilation_config={'cudagraph_mode': <Mode.NONE: 0>, 'cudagraph_capture_sizes': [1, 2, 4]}, k=K(a=[1])\n"
        b"[kv_cache_utils.py:2327] CPU KV cache size: 65,536 tokens, "
        b"Maximum concurrency for 4,096 tokens per request: 16.00x\nSetting attention block size to 544 tokens\n"
        b"Multiplying the GPU KV cache size by the cp_world_size 2\nUsing max model len 4096\n",
    ]


def experiment_config() -> list[bytes]:
    return [
        b"model: a/b-7b\nhardware: H100\ntensor_parallelism: 2\nmax_num_seqs: 128\nseed: 1\n",
        b"model: a/b-7b\nengine: {max-num-seqs: 7, dtype: half, speculative_config: {method: mtp}}\n",
    ]


def kv_events() -> list[bytes]:
    events = [
        ["BlockStored", [1234567890123456789], None, [5, 6, 7, 8], 4, None, "GPU", None],
        ["BlockRemoved", [1, 2], "GPU"],
        ["AllBlocksCleared"],
        ["TransferInitiated", 7, "r", "GPU", "CPU", 5, 12],
        ["TransferCompleted", 7, "r", "GPU", "CPU", 5, True, 12],
        ["RemoteTransferCompleted", 8, "r", "NIXL", 0, 1, 5, True],
        ["CacheEviction", "GPU", 2, "lru", 9, ["AAAAAAAAAAE=", 5]],
    ]
    t = test_reader_kv_events.T
    return [_lines([[t, events[:3], 0, None], [t + 1, events[3:], 0, 33]])]


def forward_passes() -> list[bytes]:
    return [_lines(test_reader_forward_passes.forward_pass(number) for number in range(3))]


def metrics() -> list[bytes]:
    return [test_reader_metrics.snapshot(3).encode(), test_reader_metrics.OLD.encode()]


def _written(table: pl.DataFrame) -> bytes:
    written = io.BytesIO()
    table.write_parquet(written)
    return written.getvalue()


def parquet() -> list[bytes]:
    metadata = {"model": "m", "clock": {"name": "server", "kind": "epoch", "zero_us": 1000}, "block_tokens": 16}
    files = []
    for columns in (PLAIN, PLAIN | {"prefix_blocks": [[7, 8], None], "ttft_us": [5, 6], "status": ["ok", "error"]}):
        written = io.BytesIO()
        table = pl.DataFrame(columns).to_arrow()
        pq.write_table(table.replace_schema_metadata({METADATA: json.dumps(metadata).encode()}), written)
        files.append(written.getvalue())
    return files


def mooncake() -> list[bytes]:
    request = test_reader_mooncake.request
    return [_lines([request(5, hash_ids=[7, 9]), request(0, 1300, hash_ids=[7, 8, 2**63 - 1]), request(9.5)])]


# Format -> its seeds, under the names of the registry.
BY_FORMAT: dict[str, Callable[[], list[bytes]]] = {
    "inference-perf": lifecycle_records,
    "guidellm": lambda: [json.dumps(test_reader_guidellm.WHOLE).encode()],
    "vllm-bench": lambda: [_lines([test_reader_vllm_bench.result(3)]), _lines([test_reader_vllm_bench.result(2)] * 2)],
    "aiperf": lambda: [
        _lines([test_reader_aiperf.record(0), test_reader_aiperf.with_metrics(1, usage_prompt_tokens={"value": 9})])
    ],
    "tracev2": lambda: [
        "\n".join([",".join(test_reader_tracev2.NEW), *map(test_reader_tracev2.ok, range(3))]).encode()
    ],
    "parquet": parquet,
    "mooncake": mooncake,
    "azure-llm": lambda: [
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16T18:17:04Z,3,8"
    ],
    "burstgpt": lambda: [
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    ],
    "legacy-blis-csv": lambda: [
        b'arrival_time,request_id,model,prefill_tokens,decode_tokens\n0.5,r0,m,"[11, 12, 13]","[7, 8]"\n'
    ],
    "sglang-bench": lambda: [_lines([test_reader_other_tools.SGLANG] * 2)],
    "llmservingsim": lambda: [_lines([test_reader_other_tools.SIMULATED] * 2)],
    "llmperf": lambda: [json.dumps(test_reader_other_tools.LLMPERF).encode()],
    "genai-bench": lambda: [json.dumps(test_reader_other_tools.GENAI).encode()],
    "table": lambda: [
        b"arrival_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms,status,prefix,prefix_tokens\n0.5,9,3,5,20,ok,a,4\n1,8,2,4,9,,a,3\n",
        _lines([{"arrival_us": 5, "input_tokens": 7, "osl": 2, "ttft_ms": 3, "itls_s": [0.01], "error": None}] * 3),
        _written(pl.DataFrame({"arrival_s": [0.5, 1], "prompt_tokens": [9, 8], "output_tokens": [3, 2]})),
    ],
    "aiperf-summary": lambda: [json.dumps(test_reader_aiperf.SUMMARY).encode()],
    "guidellm-csv": lambda: [b"Type,Run Id,Id,Name,x\n1,2,3,4,5\n"],
    "load-levels": lambda: [
        b"name,concurrency,isl,osl,ttft_ms,p99_e2e_s\nx,8,100,9,5,2\n",
        b"rate,isl,osl,tpot_ms\n2,9,3,5\n",
    ],
}


def of_every_kind() -> list[bytes]:
    every = [otlp_framing, kv_events, server_log, metrics, forward_passes, *BY_FORMAT.values()]
    return [content for drawn in every for content in drawn()[:2]]
