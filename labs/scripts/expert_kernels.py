"""What a layer of experts takes on an H100 beyond reading them, and a dense product beyond its weights, as measured.

    python labs/scripts/expert_kernels.py      # needs the extra: pip install 'blis-replay-labs[silicon]'

A line through the measurements of ``aiconfigurator-core`` (vLLM, bfloat16, 16 to 64 tokens, which touch all 8 experts):
time = constant + multiple * bytes / bandwidth, of least squared relative errors.  A dense feed-forward network has two
products where a mixture has one kernel of all experts, so a layer of experts costs the difference of the constants
more.  It is the prior of ``per_moe_layer``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats
from blis_replay.blis.latency.datasheets import gpu_named

EXPERTS, BYTES, TOKENS = 8, 2, (16, 64)
# Shorter reads than these are all latency, longer ones all bandwidth (us).
READS_US = (5, 100)
PRODUCTS_OF_A_DENSE_LAYER = 2


def line(read_us: Floats, took_us: Floats) -> tuple[float, float, float]:
    """Constant (us), multiple, and mean relative error."""
    design = np.column_stack([np.ones(len(read_us)), read_us])
    found = np.linalg.lstsq(design / took_us[:, None], np.ones(len(took_us)), rcond=None)[0]
    return float(found[0]), float(found[1]), float(np.abs(design @ found / took_us - 1).mean())


def main() -> None:
    """Print a row for each distribution of tokens over experts, one for dense products, and the difference."""
    import aiconfigurator_core

    data = Path(aiconfigurator_core.__file__).parent / "systems" / "data" / "h100_sxm"
    bandwidth = gpu_named("H100-SXM").memory_bytes_per_s / 1e6
    chosen = pl.col("gemm_dtype") == "bfloat16", pl.col("m").is_between(*TOKENS)
    products = pl.read_parquet(*sorted(data.glob("gemm/vllm/*/gemm_perf.parquet"))[-1:]).filter(*chosen)
    read_us = (products["n"] * products["k"]).to_numpy() * BYTES / bandwidth
    within = (read_us > READS_US[0]) & (read_us < READS_US[1])
    print("| kernel | measured | us constant | of reading | mean error |\n|---|---|---|---|---|")
    product = line(read_us[within], products["latency"].to_numpy()[within] * 1e3)
    row("dense product", int(within.sum()), product)
    chosen = pl.col("moe_dtype") == "bfloat16", pl.col("num_experts") == EXPERTS, pl.col("moe_ep_size") == 1
    kernels = pl.read_parquet(*sorted(data.glob("moe/vllm/*/moe_perf.parquet"))[-1:]).filter(
        *chosen, pl.col("num_tokens").is_between(*TOKENS), pl.col("moe_tp_size") <= EXPERTS
    )
    constants = []
    for (spread,), of in sorted(kernels.group_by("distribution")):
        weights = EXPERTS * 3 * (of["hidden_size"] * of["inter_size"] / of["moe_tp_size"]).to_numpy()
        found = line(weights * BYTES / bandwidth, of["latency"].to_numpy() * 1e3)
        row(f"{EXPERTS} experts, {spread}", len(of), found)
        constants.append(found[0])
    more = np.array(constants) - PRODUCTS_OF_A_DENSE_LAYER * product[0]
    print(f"\na layer of experts more: {more.mean():.0f} us ({more.min():.0f} to {more.max():.0f})")


def row(kernel: str, measured: int, found: tuple[float, float, float]) -> None:
    """A line of the table."""
    constant_us, multiple, error = found
    print(f"| {kernel} | {measured} | {constant_us:.1f} | {multiple:.2f} | {100 * error:.1f} % |")


if __name__ == "__main__":
    main()
