"""What vLLM takes where an engine argument is not given: by release, device, memory and entry point.

The values stand in the packs of the releases (``base.engine_packs``); here, which of them applies to a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from blis_replay.base.engine_packs import ArgumentDefault, Release, Value, engine_packs, release_numbers, shown_argument
from blis_replay.ingest.recording import Setting

# Since which release (None: the oldest, and before) an argument has a default, and the default.
Dated = tuple[Release | None, ArgumentDefault]


@cache
def dated_defaults() -> Mapping[str, tuple[Dated, ...]]:
    """Of each argument that every release has the defaults, with the release since which; the first that applies holds.

    The oldest are without a release: older servers are taken to have them too.
    """
    oldest, *newer = engine_packs()
    dated = {name: _as_defaults(said, None) for name, said in oldest.arguments.items()}
    before = oldest
    for pack in newer:
        for name in dated:
            if pack.arguments[name] != before.arguments[name]:
                dated[name] = _as_defaults(pack.arguments[name], release_numbers(pack.first)) + dated[name]
        before = pack
    return dated


def least_default(name: str) -> int:
    """The least that vLLM takes by itself on any machine, for a number that all releases have."""
    return min(int(entry.value) for _since, entry in dated_defaults()[name] if entry.value is not None)


def _as_defaults(said: Value | tuple[ArgumentDefault, ...], since: Release | None) -> tuple[Dated, ...]:
    entries = said if isinstance(said, tuple) else (ArgumentDefault(said),)
    return tuple((since, entry) for entry in entries)


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


def default_settings(machine: Machine) -> dict[str, Setting]:
    """The defaults of a machine.

    ``default`` where all that they depend on is known and nothing else was asked for, else ``unknown``, the value
    being an assumption; ``derived`` where the machine has no other value, or another argument tells it.
    """
    return {argument: _default_setting(entries, machine) for argument, entries in dated_defaults().items()}


def _default_setting(entries: Sequence[Dated], machine: Machine) -> Setting:
    """The first of the entries that is known to apply."""
    possible = [entry for entry in entries if _applies(entry, machine) is not False]
    certain = next(entry for entry in possible if _applies(entry, machine))
    value, what = _value(certain, machine), f"default of {_resting_on(entries, machine)}"
    before = possible[: possible.index(certain)]
    others = {_value(entry, machine): entry for entry in before if _value(entry, machine) != value}
    if others:
        listed = (f"{shown_argument(other)} {_unknown(entry, machine)}" for other, entry in others.items())
        return Setting(value, "unknown", f"assumed; {'; '.join(listed)}")
    if certain[1].forced:
        return Setting(value, "derived", f"{what}, which has no other")
    if not machine.listed:
        return Setting(value, "unknown", f"assumed: {what}; the server's arguments are not recorded")
    if machine.derived and any(default.gpu_gib for _since, default in entries):
        return Setting(value, "derived", f"{what}, by {machine.derived}")
    return Setting(value, "default", what)


def _value(entry: Dated, machine: Machine) -> int | bool | str:
    value = entry[1].value
    return value * machine.ranks if entry[1].per_rank and isinstance(value, int) else cast("int | bool | str", value)


def _applies(entry: Dated, machine: Machine) -> bool | None:
    """Whether a default applies; ``None`` if that depends on what is not known."""
    answers = [answer for answer, _asked in _conditions(entry, machine)]
    return False if False in answers else None if None in answers else True


def _unknown(entry: Dated, machine: Machine) -> str:
    """The conditions of a default that are not known of the machine: ``from vLLM 0.14 on``."""
    return " ".join(asked for answer, asked in _conditions(entry, machine) if answer is None and asked)


def _conditions(entry: Dated, machine: Machine) -> Iterator[tuple[bool | None, str]]:
    """Whether each condition of a default holds (``None``: not known), and the condition in words."""
    since, asked = entry
    if asked.device is not None:
        holds = None if machine.device is None else machine.device == asked.device
        yield holds, "on a CPU" if asked.device == "cpu" else ""
    if asked.gpu_gib is not None:
        large = None if machine.gpu_gib is None else machine.gpu_gib >= asked.gpu_gib
        yield machine.device != "cpu" and large, f"on a GPU of at least {asked.gpu_gib} GiB"
    if since is not None:
        newer = None if machine.release is None else machine.release >= since
        yield newer, f"from vLLM {'.'.join(map(str, since)).removesuffix('.0')} on"
    if asked.offline is not None:
        yield None if machine.offline is None else machine.offline == asked.offline, "with the LLM class"


def _resting_on(entries: Sequence[Dated], machine: Machine) -> str:
    """What is known of the machine that one of the entries depends on: ``vLLM 0.15.1 on a GPU below 70 GiB``."""
    dated = any(since for since, _default in entries)
    parts = [f"vLLM {machine.version}" if machine.version and dated else "vLLM"]
    defaults = [default for _since, default in entries]
    if machine.device and any(default.device for default in defaults):
        parts.append("on a CPU" if machine.device == "cpu" else "on a GPU")
    if machine.device != "cpu" and any(default.gpu_gib for default in defaults) and machine.gpu_gib is not None:
        bound = next((default.gpu_gib for default in defaults if (default.gpu_gib or 0) > machine.gpu_gib), None)
        parts[-1] += f" below {bound} GiB" if bound and machine.gpu_gib < 70 else " of at least 70 GiB"
    if any(default.offline is not None for default in defaults) and machine.offline is not None:
        parts.append("with the LLM class" if machine.offline else "as a server")
    return " ".join(parts)
