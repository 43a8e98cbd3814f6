"""What a GPU can do at best, from its datasheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.release_fields import BYTES_PER_S, FLOPS_PER_S, Fields


@dataclass(frozen=True)
class Gpu:
    """Datasheet peaks: memory and link bandwidth in bytes/s (the link in one direction), dense 16-bit FLOP/s."""

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float


@cache
def bundled_gpus() -> Mapping[str, Gpu]:
    """The GPUs that are known, by name and by the other names that recordings give them."""
    text = (resources.files("blis_replay.blis") / "gpus.yaml").read_text("utf-8")
    top = Fields(yaml.safe_load(text), "gpus.yaml", "")
    gpus: dict[str, Gpu] = {}
    for name in top.values:
        fields = top.mapping(name)
        names = [name, *map(str, fields.values.pop("also"))]  # type: ignore[call-overload]  # a list in our own file
        gpus |= dict.fromkeys(names, parse_gpu(fields, name))
    return gpus


def gpu_named(name: str | None) -> Gpu:
    """A GPU by name; raises ``ReleaseError`` for one whose datasheet is not known here."""
    gpus = bundled_gpus()
    if name is None or name not in gpus:
        raise ReleaseError(f"no datasheet of the hardware {name or '(not recorded)'}; known are {', '.join(gpus)}")
    return gpus[name]


def parse_gpu(fields: Fields, name: str = "") -> Gpu:
    """A GPU from a mapping of its fields.  Raises ``ReleaseError`` naming the field."""
    fields.text("source", optional=True)
    gpu = Gpu(
        name or fields.text("name"),
        memory_bytes_per_s=fields.in_unit("memory_bandwidth", BYTES_PER_S),
        flops_per_s=fields.in_unit("compute", FLOPS_PER_S),
        link_bytes_per_s=fields.in_unit("link_bandwidth", BYTES_PER_S),
    )
    fields.refuse_unknown()
    if not min(gpu.memory_bytes_per_s, gpu.flops_per_s, gpu.link_bytes_per_s) > 0:
        fields.refuse("memory_bandwidth", "or another peak is not positive", "take them from the datasheet")
    return gpu


def format_gpu(gpu: Gpu) -> dict[str, object]:
    """The fields that ``parse_gpu`` reads."""
    return {
        "name": gpu.name,
        "memory_bandwidth": f"{gpu.memory_bytes_per_s / 1e9:.10g} GB/s",
        "compute": f"{gpu.flops_per_s / 1e12:.10g} TFLOP/s",
        "link_bandwidth": f"{gpu.link_bytes_per_s / 1e9:.10g} GB/s",
    }
