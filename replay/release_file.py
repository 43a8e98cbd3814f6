"""Coefficient releases by name or by file, and from the artifacts of others."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.datasheets import (
    Architecture,
    Gpu,
    Gpus,
    architecture_of_config,
    bundled_gpus,
    gpu_named,
    gpus_of,
)
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.latency.physical import PhysicalModel
from blis_replay.blis.latency.roofline import DecodeGrid, Efficiency, PrefillCurve, ProductCurve, RooflineModel
from blis_replay.blis.releases.release import (
    CoefficientRelease,
    ModelEntry,
    bundled_releases,
    format_release,
    parse_release,
)
from blis_replay.replay.errors import UnknownNameError, exists_already

# A release, or a policy, is a page of text; a larger file is something else.
_LARGEST_BYTES = 1_000_000


def load_release(name_or_path: str) -> CoefficientRelease:
    """A release that ships with the package, by name, or one's own, by path.

    Raises ``UnknownNameError`` if there is neither, ``ReleaseError`` if the file is no sound
    release.
    """
    if not name_or_path:
        raise UnknownNameError("the name of the coefficients is empty; name a release that ships, or a file")
    bundled = bundled_releases()
    if name_or_path in bundled:
        return _parsed(bundled[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise UnknownNameError(f"no release or file is called {name_or_path}; releases that ship: {', '.join(bundled)}")
    return parse_release(page_of_text(path, "coefficients"), str(path))


def refuse_other_file(path: Path, name: str, models: Collection[str]) -> None:
    """Let a release be written only where nothing is, or an earlier one of its name whose models it has as well.

    Raises ``FileExistsAlreadyError``.  A pipe or a device holds nothing.
    """
    if not path.is_file():
        return
    try:
        earlier = parse_release(page_of_text(path, "coefficients"), str(path))
    except ReleaseError:
        raise exists_already(path) from None
    if earlier.name != name or not {entry.model for entry in earlier.models} <= set(models):
        raise exists_already(path)


# Those that ship are asked for once an experiment; to read one takes as long as a replay.
_parsed = cache(parse_release)


def architecture_of_file(path: Path) -> Architecture:
    """The architecture that a model's ``config.json`` describes.

    Raises ``ReleaseError`` if the file cannot be read or lacks a field.
    """
    return architecture_of_config(_json(path, "name the config.json of a model"), str(path))


def release_for_model(
    shared: CoefficientRelease,
    name: str,
    model: str,
    tensor_parallelism: int,
    gpu: Gpu,
    architecture: Architecture,
) -> CoefficientRelease:
    """The shared coefficients of a physical release on another model, without a recording of it.

    Raises ``ReleaseError`` if the release is not physical, or its models do not share their coefficients.
    """
    latencies = [entry.latency for entry in shared.models]
    physical = [latency for latency in latencies if isinstance(latency, PhysicalModel)]
    if len(physical) < len(latencies) or len({latency.coefficients for latency in physical}) != 1:
        raise ReleaseError(
            f"release {shared.name} has no coefficients that its models share; use h100-physical or one of "
            "`blis-replay coefficients generalize --out`"
        )
    latency = PhysicalModel(architecture, gpu, physical[0].coefficients, tensor_parallelism)
    entry = replace(
        shared.models[0], model=model, tensor_parallelism=tensor_parallelism, latency=latency, applies_to=()
    )
    text = format_release(
        replace(
            shared,
            name=name,
            summary=f"Coefficients of {shared.name}, fitted to other models, on the architecture of {model}.",
            hardware=gpu.name,
            models=(entry,),
        )
    )
    return parse_release(text, name)


def gpus_of_file(path: Path) -> Gpus:
    """The datasheets of a file, and those that ship for all other names; raises ``ReleaseError`` as ``gpus_of``."""
    own = gpus_of(page_of_text(path, "datasheets"), str(path))
    return {**{name: gpu for name, gpu in bundled_gpus().items() if name not in own}, **own}


def chosen_gpu(name: str | None, path: Path | None) -> Gpu:
    """The GPU of a name, or without one the only GPU of a file of datasheets.

    Raises ``ReleaseError`` for a name that neither the file nor this package has, and for a file of several GPUs.
    """
    if path is None:
        return gpu_named(name)
    own = {gpu.name: gpu for gpu in gpus_of(page_of_text(path, "datasheets"), str(path)).values()}
    if name is not None:
        return gpu_named(name, gpus_of_file(path))
    if len(own) > 1:
        raise ReleaseError(f"{path}: has {', '.join(own)}; choose one by name")
    return next(iter(own.values()))


def on_gpu(release: CoefficientRelease, gpu: Gpu) -> CoefficientRelease:
    """A release whose step times follow from a datasheet, on another GPU; its coefficients stay as they are.

    Raises ``ReleaseError`` for one whose times are those of the GPU that it was fitted on.
    """
    models = []
    for entry in release.models:
        if not isinstance(entry.latency, PhysicalModel | RooflineModel):
            raise ReleaseError(
                f"release {release.name}: the step times of {entry.model} are of {release.hardware} and follow from no "
                "datasheet; use h100-physical, or one of `blis-replay coefficients for-model` or `roofline`"
            )
        models.append(replace(entry, latency=replace(entry.latency, gpu=gpu)))
    name = f"{release.name} on {gpu.name}"
    return parse_release(format_release(replace(release, name=name, hardware=gpu.name, models=tuple(models))), name)


def roofline_release(
    name: str,
    model: str,
    hardware: str,
    latency: RooflineModel,
) -> CoefficientRelease:
    """A release with the roofline of one model, without delays: nothing of it is fitted.

    Raises ``ReleaseError`` if a step of it takes too long to be one.
    """
    rests_on = "smooth efficiencies" if latency.efficiency is None else "efficiency tables"
    summary = f"Roofline of {model}, {rests_on}, mixed steps {latency.mixed}."
    entry = ModelEntry(model, latency.tensor_parallelism, latency, Lifecycle())
    return unfitted_release(name, summary, "architecture and datasheet, nothing fitted", hardware, entry)


def unfitted_release(name: str, summary: str, source: str, hardware: str, entry: ModelEntry) -> CoefficientRelease:
    """A release of one model, nothing of it fitted.  Raises ``ReleaseError`` for what a release cannot say."""
    release = CoefficientRelease(name, "valid", summary, source, hardware, models=(entry,), fitted_on=())
    return parse_release(format_release(release), name)


def _json(path: Path, mend: str) -> object:
    try:
        document: object = json.loads(page_of_text(path, "coefficients"))
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{path}: no valid JSON ({error}); {mend}") from None
    return document


def page_of_text(path: Path, what: str, error: type[Exception] = ReleaseError) -> str:
    """The text of a file that holds ``what``; raises ``error`` if it cannot be read, is no text, or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)  # devices and pipes have no size
        if len(content) > _LARGEST_BYTES:
            raise error(f"{path}: too large for {what}; name another file")
        return content.decode("utf-8")
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); name a readable file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; name a file of {what}") from None


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
