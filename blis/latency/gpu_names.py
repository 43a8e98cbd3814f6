"""When two names mean the same GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VENDORS = {"nvidia", "amd", "intel", "tesla", "geforce", "instinct"}
_FORM_FACTORS = ("sxm", "pcie", "nvl", "oam")
_MEMORY_SIZE = re.compile(r"\b(\d+) ?gi?b\b")
_MEMORY_KIND = re.compile(r"\bhbm\d\w*\b")
# ``8xH100`` and ``H100x8`` are H100s; ``H100SXM`` and ``RTX4090`` are two words each.
_COUNT = re.compile(r"\b\d{1,2}x(?=[a-z])|(?<=\d)x\d{1,2}\b")
_JOINED = re.compile(rf"(?<=\d)(?={'|'.join(_FORM_FACTORS)})|(?<=\brtx)(?=\d)")
_CPUS = {"cpu", "xeon", "epyc"}
_GPU = re.compile(r"[abhlv]\d{2,3}[a-z]?|g[bh]\d{3}|l4|t4|mi\d{3}[a-z]?|rtx|gaudi\d?|cpu")


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


def another_gpu(one: str, other: str) -> bool:
    """Whether two names mean different GPUs for sure: both name one that is known, or a CPU, and they contradict.

    The name of a machine, such as ``a3-highgpu-8g``, contradicts none.
    """
    known = all(any(_GPU.fullmatch(word) for word in _parsed(name).model) for name in (one, other))
    return known and not same_gpu(one, other)


def _match(one: _GpuName, other: _GpuName) -> bool:
    parts = ("form_factor", "memory_gb", "memory_kind")
    contradict = any(None is not getattr(one, part) != getattr(other, part) is not None for part in parts)
    less_specific = one.model <= other.model or other.model <= one.model
    return less_specific and bool(one.model and other.model) and not contradict


def _parsed(name: str) -> _GpuName:
    words = _JOINED.sub(" ", _COUNT.sub("", " ".join(re.findall(r"[a-z0-9]+", name.lower()))))
    size, kind = _MEMORY_SIZE.search(words), _MEMORY_KIND.search(words)
    rest = _MEMORY_KIND.sub("", _MEMORY_SIZE.sub("", words)).split()
    forms = {word: form for word in rest for form in _FORM_FACTORS if word.rstrip("0123456789") == form}
    model = frozenset({"cpu"} if _CPUS & set(rest) else set(rest) - _VENDORS - forms.keys())
    form_factor = next(iter(forms.values()), None)
    if form_factor is None and model == {"h100"} and kind is not None and kind[0] == "hbm3":
        form_factor = "sxm"  # nvidia-smi names the other forms of the H100, and this one by its memory
    return _GpuName(model, form_factor, size and size[1], kind and kind[0])
