"""Profiles for Vidur's own regression, made of measured operator times.

    python labs/scripts/vidur_profiles.py codellama/CodeLlama-34b-Instruct-hf h100 --tensor-parallelism 2

Needs the extra: pip install 'blis-replay-labs[silicon]'.  Vidur needs a profile of the model on the GPU: a time for
each operator of a layer by tokens, and of attention by requests and context.  Its package downloads profiles as data
sets.  This writes them where the package looks, so that `compare --simulators vidur:PYTHON` finds them.

The measured tables include additions in the norms, and rotary embeddings and KV-cache writes in attention.  These
operators are therefore zero in the profile.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from blis_replay.blis.latency.datasheets import Architecture, bundled_architectures, config_of
from blis_replay_labs.board.adapters.vidur import NODES, data_sets, profiles_folder
from blis_replay_labs.silicon.tabulate import AskedPackage, Deployment, system_named

# As its own profiles have them: every size that a kernel is chosen by, then ever wider.
_TOKENS = (*range(1, 17), *range(24, 129, 8), *range(160, 513, 32), *range(640, 2049, 128), *range(2560, 8193, 512))
_CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_CONTEXTS = (0, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
# Of a layer: operators of Vidur by those of the package.
_OPERATORS = {
    "attn_pre_proj": "context_qkv_gemm",
    "attn_post_proj": "context_proj_gemm",
    "mlp_up_proj": "context_gate_ffn1_gemm",
    "mlp_down_proj": "context_ffn2_gemm",
    "mlp_act": "context_act_gate",
    "input_layernorm": "context_add_norm_1",
    "post_attention_layernorm": "context_add_norm_2",
}
_ELSEWHERE = ("attn_rope", "add")
_ALL_REDUCE = "context_ar_1"
# What Vidur's own configurations say of the models that it has, whatever the model's vocabulary is.
_VOCABULARY = 32_768
_BYTES_PER_VALUE, _US_PER_MS = 2, 1_000

Row = Mapping[str, object]


def operator_rows(asked: AskedPackage, model: Architecture, tensor_parallelism: int) -> Iterator[Row]:
    """A row by number of tokens: ms of each operator of a layer."""
    for tokens in _TOKENS:
        ms = _by_operator(asked, tokens)
        times = {f"time_stats.{name}.median": ms[of] / model.layers for name, of in _OPERATORS.items()}
        times |= {f"time_stats.{name}.median": 0.0 for name in _ELSEWHERE}
        yield {
            "num_tokens": tokens,
            "n_head": model.attention_heads,
            "n_kv_head": model.kv_heads,
            "n_embd": model.hidden_size,
            "n_expanded_embd": model.intermediate_size,
            "use_gated_mlp": True,
            "vocab_size": _VOCABULARY,
            "num_tensor_parallel_workers": tensor_parallelism,
            **times,
        }


def attention_rows(asked: AskedPackage, model: Architecture, tensor_parallelism: int, block_size: int) -> Iterator[Row]:
    """A row by chunk and context, and by decodes and context: ms of a layer's attention."""
    same = {"n_embd": model.hidden_size, "n_q_head": model.attention_heads, "n_kv_head": model.kv_heads}
    same |= {"block_size": block_size, "num_tensor_parallel_workers": tensor_parallelism}
    for context in _CONTEXTS:
        for tokens in _CHUNKS:
            us = max(asked.prefill_us(1, tokens, context) - asked.mixed_us(tokens), 0.0)
            yield _attention(same, 1, tokens, context, us / model.layers, 0.0)
        for requests in _REQUESTS:
            us = asked.decode_attention_us(requests, max(context, 1))
            yield _attention(same, requests, 0, context, 0.0, us / model.layers)


def _attention(
    same: Mapping[str, int], requests: int, chunk: int, context: int, prefill_us: float, decode_us: float
) -> Row:
    return {
        **same,
        "batch_size": requests,
        "prefill_chunk_size": chunk,
        "kv_cache_size": context,
        # The one column of older versions.
        "time_stats.attn.median": (prefill_us + decode_us) / _US_PER_MS,
        "time_stats.attn_prefill.median": prefill_us / _US_PER_MS,
        "time_stats.attn_decode.median": decode_us / _US_PER_MS,
        "time_stats.attn_kv_cache_save.median": 0.0,
    }


def all_reduce_rows(asked: AskedPackage, model: Architecture, tensor_parallelism: int) -> Iterator[Row]:
    """A row by bytes: ms of one sum over the GPUs."""
    for tokens in _TOKENS:
        ms = _by_operator(asked, tokens).get(_ALL_REDUCE, 0.0) / model.layers
        yield {
            "size": tokens * model.hidden_size * _BYTES_PER_VALUE,
            "num_workers": tensor_parallelism,
            "devices_per_node": tensor_parallelism,
            "collective": "all_reduce",
            "time_stats.all_reduce.median": ms,
        }


def _by_operator(asked: AskedPackage, tokens: int) -> dict[str, float]:
    shared, *_attention_times = asked.handle.mixed_step_breakdown_per_op(tokens, 0, tokens, 1)
    return {name: float(ms) for name, ms, *_ in shared}


def write_data_set(cache: Path, kind: str, name: str, config: Row, tables: Mapping[str, Sequence[Row]]) -> None:
    """A data set as the hub's library keeps what it has fetched, so that it fetches nothing."""
    home = cache / "profiling_data" / kind / f"datasets--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / "operator-times"
    snapshot.mkdir(parents=True, exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text("operator-times", "utf-8")
    (snapshot / "config.json").write_text(json.dumps(config), "utf-8")
    for table, rows in tables.items():
        file = snapshot / f"{table}.csv.xz"
        there = list(csv.DictReader(io.StringIO(lzma.decompress(file.read_bytes()).decode()))) if file.exists() else []
        # Other layouts of the model.
        rows_by_key = {_key(row): row for row in (*there, *rows)}
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows_by_key.values())
        file.write_bytes(lzma.compress(text.getvalue().encode()))


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(value) for name, value in row.items() if not name.startswith("time_stats"))


def main() -> None:
    """Ask for the operators, and write both data sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[name for name, a in bundled_architectures().items() if a.experts <= 1])
    parser.add_argument("gpu", choices=("h100", "a100"))
    parser.add_argument("--tensor-parallelism", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    given = parser.parse_args()
    model, tp = bundled_architectures()[given.model], given.tensor_parallelism
    compute, network = data_sets(given.model, given.gpu)
    cache = profiles_folder(given.model)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(config_of(model)), "utf-8")
        asked = AskedPackage(Path(folder), system_named(given.gpu), Deployment(config, given.gpu, tp))
        products = list(operator_rows(asked, model, tp))
        attention = list(attention_rows(asked, model, tp, given.block_size))
        reduced = list(all_reduce_rows(asked, model, tp))
    write_data_set(
        cache,
        "compute",
        compute,
        {"model": given.model, "device_sku": given.gpu},
        {"mlp": products, "attention": attention},
    )
    tables = {"all_reduce": reduced, "send_recv": [{"size": 0, "collective": "send_recv"}]}
    write_data_set(cache, "network", network, {"sku": NODES[given.gpu]}, tables)
    print(f"{compute} and {network} in {cache}")


if __name__ == "__main__":
    main()
