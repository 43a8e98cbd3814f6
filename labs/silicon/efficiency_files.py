"""Kernel efficiencies as files: tables of MFU by shape, as BLIS publishes them (``gemm/``, ``mha/``)."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.datasheets import Architecture
from blis_replay.replay.release_file import page_of_text
from blis_replay_labs.silicon.roofline import DecodeGrid, Efficiency, PrefillCurve, ProductCurve

# Tables print three decimals: what is below says nothing, and its neighbours stand in for it.
_LEAST_MFU = 1e-4

Rows = list[tuple[float, ...]]


def efficiency_of_folder(folder: Path, architecture: Architecture, gpu: str, tensor_parallelism: int) -> Efficiency:
    """The tables for a model on a GPU: of its number of heads, else of the nearest; decode of its GPUs, else of one.

    Raises ``ReleaseError`` naming the file that is missing or cannot be read, and its line.
    """
    heads = (architecture.attention_heads, architecture.kv_heads, architecture.head_size)
    prefill = _nearest(_of_gpu(folder / "mha" / "prefill", gpu), heads, "")
    decode_folder = _of_gpu(folder / "mha" / "decode", gpu)
    try:
        decode = _nearest(decode_folder, heads, f"-tp{tensor_parallelism}")
    except ReleaseError:
        decode = _nearest(decode_folder, heads, "-tp1")
    curve = _curve(_rows(prefill, ("seq_len", "mfu")), prefill)
    requests, contexts, grid = _grid(_rows(decode, ("batch_size", "kv_len", "mfu")), decode)
    products = _of_gpu(folder / "gemm", gpu) / "data.csv"
    curves = _products(_rows(products, ("k", "n", "m", "mfu")), products)
    return Efficiency(curves, PrefillCurve(*curve), DecodeGrid(requests, contexts, grid))


def _of_gpu(folder: Path, gpu: str) -> Path:
    names = sorted(place.name for place in folder.iterdir() if place.is_dir()) if folder.is_dir() else []
    for name in names:
        if gpu.lower().startswith(name.lower()):
            return folder / name
    have = f"it has {', '.join(names)}" if names else "there is no such folder"
    raise ReleaseError(f"{folder}: no tables of {gpu} ({have}); give a folder with gemm and mha tables of that GPU")


def _nearest(folder: Path, heads: tuple[int, int, int], suffix: str) -> Path:
    found = []
    for path in sorted(folder.glob(f"*{suffix}.csv")):
        if match := re.fullmatch(rf"(\d{{1,6}})-(\d{{1,6}})-(\d{{1,6}}){suffix}\.csv", path.name):
            found.append((math.dist(heads, [int(part) for part in match.groups()]), path))
    if not found:
        raise ReleaseError(f"{folder}: no table HEADS-KVHEADS-SIZE{suffix}.csv; add one")
    return min(found)[1]


def _rows(path: Path, names: tuple[str, ...]) -> Rows:
    """The named columns, rows of usable MFU only; the last column is the MFU."""
    rows: Rows = []
    table = csv.DictReader(page_of_text(path, "efficiencies").splitlines())
    if missing := [name for name in names if name not in (table.fieldnames or ())]:
        raise ReleaseError(f"{path}: no column {missing[0]}; its header must name {', '.join(names)}")
    try:
        for row in table:
            values = tuple(_number(row[name], path, table.line_num, name) for name in names)
            if values[-1] >= _LEAST_MFU:
                rows.append(values)
    except csv.Error as error:
        raise ReleaseError(f"{path}, line {table.line_num + 1}: no CSV ({error}); correct it") from None
    if not rows:
        raise ReleaseError(f"{path}: no row with an MFU above {_LEAST_MFU:g}; measure it again")
    return rows


def _number(text: str | None, path: Path, line: int, name: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e9:
        raise ReleaseError(f"{path}, line {line}: {name} is not a number from 0 on; correct it")
    return value


def _curve(rows: Rows, path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    by_tokens = dict(sorted((tokens, mfu) for tokens, mfu in rows))
    if min(by_tokens) <= 0:
        raise ReleaseError(f"{path}: a length of 0; correct it")
    return tuple(by_tokens), tuple(by_tokens.values())


def _products(rows: Rows, path: Path) -> tuple[ProductCurve, ...]:
    shapes: dict[tuple[float, float], Rows] = defaultdict(list)
    for inputs, outputs, tokens, mfu in rows:
        shapes[inputs, outputs].append((tokens, mfu))
    return tuple(ProductCurve(int(k), int(n), *_curve(shapes[k, n], path)) for k, n in sorted(shapes))


def _grid(rows: Rows, path: Path) -> tuple[tuple[float, ...], tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Batch sizes, contexts, and an MFU for each pair; where one was not measured, from its batch's neighbours."""
    batches: dict[float, Rows] = defaultdict(list)
    for requests, context, mfu in rows:
        batches[requests].append((context, mfu))
    if min(batches) <= 0:
        raise ReleaseError(f"{path}: a batch of 0; correct it")
    contexts = tuple(sorted({context for _requests, context, _mfu in rows}))
    grid = [np.interp(contexts, *_curve(batches[requests], path)) for requests in sorted(batches)]
    return tuple(sorted(batches)), contexts, tuple(tuple(row.tolist()) for row in grid)
