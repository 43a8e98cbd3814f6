"""Kernel efficiency tables from a folder: which is taken, what it says, what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.datasheets import bundled_architectures, gpu_named
from blis_replay_labs.silicon.efficiency_files import efficiency_of_folder
from blis_replay_labs.silicon.roofline import RooflineModel, roofline_release

LLAMA_7B = "meta-llama/Llama-2-7b-hf"  # 32 query and KV heads of 128
LLAMA_70B = "meta-llama/Llama-2-70b-hf"  # 64 query heads, 8 KV heads


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """One shape of products, two kinds of heads, decode tables of one and two GPUs for one of them."""
    files = {
        "gemm/h100/data.csv": "m,k,n,latency_us,mfu\n64,4096,4096,9,0.2\n8,4096,4096,9,0.1\n1,4096,4096,9,0.0\n",
        "mha/prefill/h100/32-32-128.csv": "dtype,seq_len,latency_us,mfu\nbf16,4096,9,0.6\nbf16,1024,9,0.2\n",
        "mha/prefill/h100/64-8-128.csv": "dtype,seq_len,latency_us,mfu\nbf16,4096,9,0.7\n",
        "mha/decode/h100/32-32-128-tp1.csv": (
            "batch_size,kv_len,latency_us,mfu\n1,1024,9,0.0\n1,4096,9,0.002\n16,1024,9,0.01\n16,8192,9,0.03\n"
        ),
        "mha/decode/h100/32-32-128-tp2.csv": "batch_size,kv_len,latency_us,mfu\n1,1024,9,0.005\n",
        "mha/decode/h100/64-8-128-tp1.csv": "batch_size,kv_len,latency_us,mfu\n1,1024,9,0.004\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tables_are_those_of_the_heads_and_gpus(tables: Path) -> None:
    """Rows in any order; an MFU of 0.0 is unmeasured, and its neighbours in the batch stand in for it."""
    read = efficiency_of_folder(tables, bundled_architectures()[LLAMA_7B], "H100-SXM", 1)
    assert [(c.inputs, c.outputs, c.tokens, c.mfu) for c in read.products] == [(4096, 4096, (8, 64), (0.1, 0.2))]
    assert (read.prefill.tokens, read.prefill.mfu) == ((1024, 4096), (0.2, 0.6))
    assert (read.decode.requests, read.decode.context_tokens) == ((1, 16), (1024, 4096, 8192))
    # Batch 16 at 4,096: 3/7 of the way from 1,024 to 8,192.
    assert read.decode.mfu == ((0.002, 0.002, 0.002), (0.01, pytest.approx(0.01 + 0.02 * 3 / 7), 0.03))


def test_decode_tables_of_one_gpu_stand_in_for_more(tables: Path) -> None:
    architectures = bundled_architectures()
    assert efficiency_of_folder(tables, architectures[LLAMA_7B], "H100-SXM", 2).decode.mfu == ((0.005,),)
    # None of two GPUs but that of 32 heads, which is nearer than none.
    (tables / "mha/decode/h100/32-32-128-tp2.csv").unlink()
    assert efficiency_of_folder(tables, architectures[LLAMA_70B], "H100-SXM", 2).decode.mfu == ((0.004,),)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("gemm/h100/data.csv", "m,k,n\n8,1,1\n", "data.csv: no column mfu; its header must name k, n, m, mfu"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n8,4096,4096,fast\n", "data.csv, line 2: mfu is not a number from 0 on"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n8,4096\n", "data.csv, line 2: n is not a number from 0 on"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n8,4096,4096,nan\n", "data.csv, line 2: mfu is not a number from 0 on"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n8,4096,4096,0\n", "data.csv: no row with an MFU above 0.0001"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n0,4096,4096,0.1\n", "data.csv: a length of 0"),
        ("gemm/h100/data.csv", "", "data.csv: no column k"),
        ("gemm/h100/data.csv", "m,k,n,mfu\n" + "8" * 200_000, "data.csv, line 2: no CSV (field larger"),
        ("mha/prefill/h100/32-32-128.csv", "\x00,\x00\n", "32-32-128.csv: no column seq_len"),
        ("mha/decode/h100/32-32-128-tp1.csv", "batch_size,kv_len,mfu\n0,1,0.1\n", "tp1.csv: a batch of 0"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tables: Path, name: str, text: str, complaint: str) -> None:
    (tables / name).write_text(text)
    with pytest.raises(ReleaseError) as refused:
        efficiency_of_folder(tables, bundled_architectures()[LLAMA_7B], "H100-SXM", 1)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_the_gpu_is_refused(tables: Path) -> None:
    architecture = bundled_architectures()[LLAMA_7B]
    with pytest.raises(ReleaseError, match=r"prefill: no tables of A100-SXM \(it has h100\)"):
        efficiency_of_folder(tables, architecture, "A100-SXM", 1)
    with pytest.raises(ReleaseError, match="there is no such folder"):
        efficiency_of_folder(tables / "gemm", architecture, "H100-SXM", 1)
    (tables / "gemm/h100/data.csv").unlink()
    with pytest.raises(ReleaseError, match=r"data\.csv: cannot be read"):
        efficiency_of_folder(tables, architecture, "H100-SXM", 1)


def test_the_published_tables_make_a_release(data_pack: Path) -> None:
    """8 shapes of products; 64 heads and 8 KV heads are measured for 1, 2 and 4 GPUs, prefill at 5 lengths."""
    architecture = bundled_architectures()[LLAMA_70B]
    read = efficiency_of_folder(data_pack / "blis-h100-mfu", architecture, "H100-SXM-80GB", 4)
    assert (len(read.products), len(read.prefill.tokens)) == (8, 5)
    assert read.prefill.mfu[1] == 0.648  # 4,096 tokens
    latency = RooflineModel(architecture, gpu_named("H100-SXM"), 4, "additive", read)
    assert roofline_release("r", LLAMA_70B, "H100-SXM", latency).models[0].latency == latency
