"""What a GPU can do at best, from its datasheet, and when two names mean the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from msgspec import Struct, structs

from blis_replay.blis.errors import ReleaseError
from blis_replay.strict.document import Bytes, BytesPerS, FlopsPerS, Text, read_yaml

_NAMES = {
    "memory_bytes_per_s": "memory_bandwidth",
    "flops_per_s": "compute",
    "link_bytes_per_s": "link_bandwidth",
    "flops_8_bit_per_s": "compute_8_bit",
    "flops_32_bit_per_s": "compute_32_bit",
    "memory_bytes": "memory",
}


class Gpu(Struct, frozen=True, rename=_NAMES):
    """Datasheet peaks: memory and link bandwidth in bytes/s (the link in one direction), dense 16-bit FLOP/s.

    ``flops_8_bit_per_s``, ``flops_32_bit_per_s``: of numbers of these widths, where they are not those of 16 bits.
    ``memory_bytes``: how much there is, None if nobody says.
    """

    name: Text
    memory_bytes_per_s: BytesPerS
    flops_per_s: FlopsPerS
    link_bytes_per_s: BytesPerS
    source: Text | None = None
    flops_8_bit_per_s: FlopsPerS | None = None
    flops_32_bit_per_s: FlopsPerS | None = None
    memory_bytes: Bytes | None = None

    def flops_at(self, bytes_per_parameter: int) -> float:
        """FLOP/s of a model whose numbers are of so many bytes; where the datasheet does not say, of 16 bits."""
        own = {1: self.flops_8_bit_per_s, 4: self.flops_32_bit_per_s}.get(bytes_per_parameter)
        return own or self.flops_per_s


Gpus = Mapping[str, Gpu]


class _Datasheet(Struct, frozen=True, rename=_NAMES):
    source: Text
    memory_bytes_per_s: BytesPerS
    flops_per_s: FlopsPerS
    link_bytes_per_s: BytesPerS
    also: tuple[Text, ...] = ()
    flops_8_bit_per_s: FlopsPerS | None = None
    flops_32_bit_per_s: FlopsPerS | None = None
    memory_bytes: Bytes | None = None


@cache
def bundled_gpus() -> Gpus:
    """The GPUs that are known, by name and by the other names that recordings give them."""
    found = gpus_of((resources.files("blis_replay.blis.latency") / "gpus.yaml").read_text("utf-8"), "gpus.yaml")
    # Their sources stay in that file; of others a release has to say where the numbers are from.
    return {name: structs.replace(gpu, source=None) for name, gpu in found.items()}


def gpus_of(text: str, origin: str) -> Gpus:
    """The GPUs of a file of datasheets (YAML), by all of their names; ``origin`` names it in errors.

    Raises ``ReleaseError`` naming the field and what is wrong with it.
    """
    sheets = read_yaml(text, dict[str, _Datasheet], origin, "a datasheet", ReleaseError)
    if not sheets:
        raise ReleaseError(f"{origin}: has no GPU; name one, with its datasheet below it")
    gpus: dict[str, Gpu] = {}
    for name, sheet in sheets.items():
        facts = structs.asdict(sheet)
        del facts["also"]
        gpus |= dict.fromkeys([name, *sheet.also], Gpu(name, **facts))
    return gpus


def gpu_named(name: str | None, gpus: Gpus | None = None) -> Gpu:
    """A GPU by name, in any spelling that means one of ``gpus``, those that ship if None.

    Raises ``ReleaseError`` for one whose datasheet is not known, and for a name that fits several (``H100``).
    """
    gpus = bundled_gpus() if gpus is None else gpus
    if name is not None and name in gpus:
        return gpus[name]
    matching = {gpu.name: gpu for known, gpu in gpus.items() if name is not None and same_gpu(name, known)}
    if len(matching) != 1:
        raise ReleaseError(
            f"no datasheet of the hardware {name or '(not recorded)'}; known are {', '.join(gpus)}; "
            "give its datasheet with --gpu-file"
        )
    return next(iter(matching.values()))


_VENDORS = {"nvidia", "amd", "intel", "tesla"}
_FORM_FACTORS = ("sxm", "pcie", "nvl", "oam")
_MEMORY_SIZE = re.compile(r"\b(\d+) ?gi?b\b")
_MEMORY_KIND = re.compile(r"\bhbm\d\w*\b")


@dataclass(frozen=True)
class _GpuName:
    """The parts of a GPU's name; None or empty where the name does not say."""

    model: frozenset[str]
    form_factor: str | None
    memory_gb: str | None
    memory_kind: str | None


def same_gpu(one: str, other: str) -> bool:
    """Whether two names can mean the same GPU: one may say less than the other, but they must not contradict.

    ``H100`` is an ``H100-SXM-80GB`` and an ``NVIDIA H100 80GB HBM3``; an ``H100-PCIe`` is neither.  Of names
    joined by commas one must match.
    """
    return any(_match(_parsed(a), _parsed(b)) for a in one.split(",") for b in other.split(","))


def _match(one: _GpuName, other: _GpuName) -> bool:
    parts = ("form_factor", "memory_gb", "memory_kind")
    contradict = any(None is not getattr(one, part) != getattr(other, part) is not None for part in parts)
    less_specific = one.model <= other.model or other.model <= one.model
    return less_specific and bool(one.model and other.model) and not contradict


def _parsed(name: str) -> _GpuName:
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    size, kind = _MEMORY_SIZE.search(words), _MEMORY_KIND.search(words)
    rest = _MEMORY_KIND.sub("", _MEMORY_SIZE.sub("", words)).split()
    forms = {word: form for word in rest for form in _FORM_FACTORS if word.rstrip("0123456789") == form}
    model = frozenset(rest) - _VENDORS - forms.keys()
    form_factor = next(iter(forms.values()), None)
    if form_factor is None and model == {"h100"} and kind is not None and kind[0] == "hbm3":
        form_factor = "sxm"  # nvidia-smi names the other forms of the H100, and this one by its memory
    return _GpuName(model, form_factor, size and size[1], kind and kind[0])
