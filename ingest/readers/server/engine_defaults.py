"""What vLLM takes where an engine argument is not given: by release, device, memory and entry point.

One table, read from vLLM's own source of 0.11.2, 0.13.0, 0.14.0, 0.15.1, 0.17.0, 0.20.0, 0.24.0, 0.25.0, 0.26.0,
0.27.1, 0.28.0 and 0.32.0; the file is named beside each group.  The first entry that applies is the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from blis_replay.ingest.recording import Setting

Release = tuple[int, int]


@dataclass(frozen=True)
class Default:
    """The value of an argument where all that is said here holds; what is not said may be anything.

    ``since``: the first release, ``device``: ``cpu`` or ``gpu``, ``gpu_gib``: least memory of the GPU, ``offline``:
    whether vLLM's ``LLM`` class is used and not its server.  ``per_rank``: times tensor and pipeline parallelism.
    ``forced``: there is no other value, whatever is asked for.
    """

    argument: str
    value: int | bool | str
    since: Release | None = None
    device: str | None = None
    gpu_gib: int | None = None
    offline: bool | None = None
    per_rank: bool = False
    forced: bool = False


DEFAULTS = (
    # vllm/platforms/cpu.py (CpuPlatform.check_and_update_config); vllm/config/cache.py (DEFAULT_BLOCK_SIZE)
    Default("block_size", 128, device="cpu"),
    Default("block_size", 16),
    # vllm/platforms/cpu.py; vllm/config/scheduler.py: False before 0.14, then None, made true in vllm/config/vllm.py
    Default("async_scheduling", False, since=(0, 14), device="cpu", forced=True),
    Default("async_scheduling", True, since=(0, 14)),
    Default("async_scheduling", False),
    # vllm/engine/arg_utils.py (EngineArgs.get_batch_defaults).  160 GiB count from 0.28; A100s never count as large.
    Default("max_num_seqs", 256, device="cpu", offline=True, per_rank=True),
    Default("max_num_seqs", 128, device="cpu", per_rank=True),
    Default("max_num_seqs", 1024, gpu_gib=70),
    Default("max_num_seqs", 256),
    Default("max_num_batched_tokens", 4096, device="cpu", offline=True, per_rank=True),
    Default("max_num_batched_tokens", 2048, device="cpu", per_rank=True),
    Default("max_num_batched_tokens", 16384, since=(0, 28), gpu_gib=160),
    Default("max_num_batched_tokens", 16384, gpu_gib=70, offline=True),
    Default("max_num_batched_tokens", 8192, gpu_gib=70),
    Default("max_num_batched_tokens", 8192, offline=True),
    Default("max_num_batched_tokens", 2048),
    # vllm/config/model.py (is_prefix_caching_supported, is_chunked_prefill_supported): on for models that generate
    Default("enable_prefix_caching", True),
    Default("enable_chunked_prefill", True),
    # vllm/config/scheduler.py
    Default("scheduling_policy", "fcfs"),
    Default("long_prefill_token_threshold", 0),
)

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
        if default.since is not None:
            yield None if self.release is None else self.release >= default.since
        if default.device is not None:
            yield None if self.device is None else self.device == default.device
        if default.gpu_gib is not None:
            yield False if self.device == "cpu" else None if self.gpu_gib is None else self.gpu_gib >= default.gpu_gib
        if default.offline is not None:
            yield None if self.offline is None else self.offline == default.offline

    def text(self, default: Default) -> str:
        """What the default rests on, in words."""
        of = [entry for entry in DEFAULTS if entry.argument == default.argument]
        parts = [f"vLLM {self.version}" if self.version and any(entry.since for entry in of) else "vLLM"]
        if self.device and any(entry.device for entry in of):
            parts.append("on a CPU" if self.device == "cpu" else "on a GPU")
        if self.device != "cpu" and any(entry.gpu_gib for entry in of) and self.gpu_gib is not None:
            bound = next((entry.gpu_gib for entry in of if (entry.gpu_gib or 0) > self.gpu_gib), None)
            parts[-1] += f" below {bound} GiB" if bound and self.gpu_gib < 70 else " of at least 70 GiB"
        if any(entry.offline is not None for entry in of) and self.offline is not None:
            parts.append("with the LLM class" if self.offline else "as a server")
        return f"default of {' '.join(parts)}"


def release_of(version: object) -> Release | None:
    """Major and minor of a version; ``None`` of one that tells nothing (a build without tags is called 0.1.dev)."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})", str(version or ""))
    release = (int(match[1]), int(match[2])) if match else None
    return None if release is None or release < (0, 6) else release


def default_settings(machine: Machine) -> dict[str, Setting]:
    """The defaults of a machine.

    ``default`` where all that they depend on is known and nothing else was asked for, else ``unknown``, the value
    being an assumption; ``derived`` where the machine has no other value, or another argument tells it.
    """
    return {
        argument: _default_setting([entry for entry in DEFAULTS if entry.argument == argument], machine)
        for argument in dict.fromkeys(entry.argument for entry in DEFAULTS)
    }


def _default_setting(entries: Sequence[Default], machine: Machine) -> Setting:
    possible = [entry for entry in entries if machine.applies(entry) is not False]
    certain = next(entry for entry in possible if machine.applies(entry))
    value, words = _scaled(certain, machine), machine.text(certain)
    before = possible[: possible.index(certain)]
    others = {_scaled(entry, machine): entry for entry in before if _scaled(entry, machine) != value}
    if others:
        return Setting(value, "unknown", f"assumed; {_otherwise(others, machine)}")
    if certain.forced:
        return Setting(value, "derived", f"{words}, which has no other")
    if not machine.listed:
        return Setting(value, "unknown", f"assumed: {words}; the server's arguments are not recorded")
    if machine.derived and any(entry.gpu_gib for entry in entries):
        return Setting(value, "derived", f"{words}, by {machine.derived}")
    return Setting(value, "default", words)


def _scaled(default: Default, machine: Machine) -> int | bool | str:
    return int(default.value) * machine.ranks if default.per_rank else default.value


def _otherwise(others: Mapping[int | str, Default], machine: Machine) -> str:
    """When the other values would hold: ``true from vLLM 0.14 on``."""
    return "; ".join(f"{_shown(value)} {_condition(entry, machine)}" for value, entry in others.items())


def _condition(entry: Default, machine: Machine) -> str:
    parts = []
    if entry.device == "cpu" and machine.device is None:
        parts.append("on a CPU")
    if entry.gpu_gib is not None and machine.gpu_gib is None:
        parts.append(f"on a GPU of at least {entry.gpu_gib} GiB")
    if entry.since is not None and machine.release is None:
        parts.append(f"from vLLM {entry.since[0]}.{entry.since[1]} on")
    if entry.offline and machine.offline is None:
        parts.append("with the LLM class")
    return " ".join(parts)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
