"""What vLLM takes where an engine argument is not given: by release, device, memory and entry point.

The values stand in the packs of the releases (``base.engine_packs``); here, which of them applies to a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from blis_replay.base.engine_packs import ArgumentDefault, Release, dated_defaults, shown_argument
from blis_replay.ingest.recording import Setting


@dataclass(frozen=True)
class Default:
    """A default of an argument, and the first release that has it (``None``: all)."""

    argument: str
    since: Release | None
    of: ArgumentDefault

    def value(self, ranks: int) -> int | bool | str:
        """The value on a machine with so many ranks."""
        value = self.of.value
        return value * ranks if self.of.per_rank and isinstance(value, int) else cast("int | bool | str", value)


@cache
def defaults() -> dict[str, tuple[Default, ...]]:
    """The defaults of each argument; the first that applies is the one."""
    dated = dated_defaults().items()
    return {name: tuple(Default(name, since, entry) for since, entry in entries) for name, entries in dated}


# GPUs of 70 GiB and more, and some below, with their GiB.  What vLLM asks is the device itself.
_GPU_GIB = (
    (r"MI355X?|MI350X?|B300|GB300", 256),
    (r"MI325X?|MI300X|B200|GB200|B100", 180),
    (r"H200|H20-3E|GH200", 141),
    (r"H100|H800|H20", 80),
    (r"RTX PRO 6000|RTX 6000 PRO", 95),
    (r"A100|A800", 40),  # whatever it has: vLLM takes no A100 for a large GPU
    (r"RTX|GEFORCE|L4|L40S?|L20|A10G?|A30|A40|A16|A2|A6000|T4|V100|P100|TITAN", 24),
)
_SIZE = re.compile(r"\b(\d{2,3}) ?GI?B\b")


def gpu_gib_of(hardware: str | None) -> int | None:
    """The memory of a GPU by its name, as far as vLLM's defaults depend on it; ``None`` if the name does not tell."""
    name = (hardware or "").upper().replace("_", " ")
    for names, gib in _GPU_GIB:
        if re.search(rf"(?<![A-Z0-9])(?:{names})(?![A-Z0-9])", name):
            return gib
    size = _SIZE.search(name)
    return int(size[1]) if size else None


@dataclass(frozen=True)
class Machine:
    """What defaults depend on, as far as it is known.

    ``ranks``: tensor times pipeline parallelism.  ``listed``: whether the arguments that the server was given are known
    in full, so that one which is not among them has its default.  ``derived``: what the memory was derived from.
    """

    release: Release | None = None
    device: str | None = None
    gpu_gib: int | None = None
    offline: bool | None = None
    ranks: int = 1
    listed: bool = False
    version: str = ""
    derived: str = ""

    def seen_from(self, token_budget: int | None) -> Machine:
        """The machine with its memory as the default of ``max_num_batched_tokens`` tells it, where nothing else did."""
        if self.gpu_gib is not None or token_budget is None or self.device == "cpu":
            return self
        gib = {2048: 24, 8192: 80, 16384: 160}.get(token_budget) if self.offline is False else None
        seen = f"max_num_batched_tokens {token_budget}, a default that depends on the GPU"
        return self if gib is None else replace(self, gpu_gib=gib, derived=seen)

    def applies(self, default: Default) -> bool | None:
        """Whether a default applies; ``None`` if that depends on what is not known."""
        answers = list(self._answers(default))
        return False if False in answers else None if None in answers else True

    def _answers(self, default: Default) -> Iterator[bool | None]:
        asked = default.of
        if default.since is not None:
            yield None if self.release is None else self.release >= default.since
        if asked.device is not None:
            yield None if self.device is None else self.device == asked.device
        if asked.gpu_gib is not None:
            yield False if self.device == "cpu" else None if self.gpu_gib is None else self.gpu_gib >= asked.gpu_gib
        if asked.offline is not None:
            yield None if self.offline is None else self.offline == asked.offline

    def text(self, default: Default) -> str:
        """What the default rests on, in words."""
        dated = defaults()[default.argument]
        of = [entry.of for entry in dated]
        parts = [f"vLLM {self.version}" if self.version and any(entry.since for entry in dated) else "vLLM"]
        if self.device and any(entry.device for entry in of):
            parts.append("on a CPU" if self.device == "cpu" else "on a GPU")
        if self.device != "cpu" and any(entry.gpu_gib for entry in of) and self.gpu_gib is not None:
            bound = next((entry.gpu_gib for entry in of if (entry.gpu_gib or 0) > self.gpu_gib), None)
            parts[-1] += f" below {bound} GiB" if bound and self.gpu_gib < 70 else " of at least 70 GiB"
        if any(entry.offline is not None for entry in of) and self.offline is not None:
            parts.append("with the LLM class" if self.offline else "as a server")
        return f"default of {' '.join(parts)}"


def default_settings(machine: Machine) -> dict[str, Setting]:
    """The defaults of a machine.

    ``default`` where all that they depend on is known and nothing else was asked for, else ``unknown``, the value
    being an assumption; ``derived`` where the machine has no other value, or another argument tells it.
    """
    return {argument: _default_setting(entries, machine) for argument, entries in defaults().items()}


def _default_setting(entries: Sequence[Default], machine: Machine) -> Setting:
    possible = [entry for entry in entries if machine.applies(entry) is not False]
    certain = next(entry for entry in possible if machine.applies(entry))
    value, words = certain.value(machine.ranks), machine.text(certain)
    before = possible[: possible.index(certain)]
    others = {entry.value(machine.ranks): entry for entry in before if entry.value(machine.ranks) != value}
    if others:
        return Setting(value, "unknown", f"assumed; {_otherwise(others, machine)}")
    if certain.of.forced:
        return Setting(value, "derived", f"{words}, which has no other")
    if not machine.listed:
        return Setting(value, "unknown", f"assumed: {words}; the server's arguments are not recorded")
    if machine.derived and any(entry.of.gpu_gib for entry in entries):
        return Setting(value, "derived", f"{words}, by {machine.derived}")
    return Setting(value, "default", words)


def _otherwise(others: Mapping[int | str, Default], machine: Machine) -> str:
    """When the other values would hold: ``true from vLLM 0.14 on``."""
    return "; ".join(f"{shown_argument(value)} {_condition(entry, machine)}" for value, entry in others.items())


def _condition(entry: Default, machine: Machine) -> str:
    parts, asked = [], entry.of
    if asked.device == "cpu" and machine.device is None:
        parts.append("on a CPU")
    if asked.gpu_gib is not None and machine.gpu_gib is None:
        parts.append(f"on a GPU of at least {asked.gpu_gib} GiB")
    if entry.since is not None and machine.release is None:
        parts.append("from vLLM " + ".".join(map(str, entry.since)).removesuffix(".0") + " on")
    if asked.offline and machine.offline is None:
        parts.append("with the LLM class")
    return " ".join(parts)
