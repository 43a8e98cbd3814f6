"""What each release of a serving engine does: packs, one YAML file each in ``fixtures/engines``.

A pack holds from its ``first`` release to the next pack's, and says what is new in it; the rest is as in the pack
before.

- ``behaviours``: switches of the simulated scheduler (``blis.trace.Behaviours``) that begin with this release.
- ``ended``: switches that end with it.
- ``arguments``: the defaults of engine arguments: a value, or several with what each asks of the machine
  (:class:`ArgumentDefault`).  The first one that applies holds.
- ``differs``: arguments (``name``, or ``name=value``) with which these releases do what is not simulated, and what.
- ``compared``: releases whose own scheduler was run and compared with the simulated one.
- ``grouped``: those of them that were compared with several groups of KV blocks too, and with which: ``windows``
  (and chunks), ``states``, ``drafts`` beside windows.
- ``offloading``: those of them that were compared with an offload of KV blocks to CPU memory too.
- ``unequal``: workloads (``0.11.0 rand-3-00003``) on which the two differed, and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from blis_replay.base.document import Text, read_yaml

FOLDER = Path(__file__).parents[1] / "fixtures" / "engines"
# Only the numbers: of 0.32.1rc1.dev7+g12ab34 they are 0.32.1.
_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")

Release = tuple[int, int, int]
_UNKNOWN: Release = (0, 0, 0)
# A build without tags calls itself 0.1.dev: that tells no release.
_FIRST_TOLD: Release = (0, 6, 0)


Value = bool | int | float | str | None


class ArgumentDefault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of an argument where all that is said here holds; what is not said may be anything.

    ``device``: ``cpu`` or ``gpu``, ``gpu_gib``: least memory of the GPU, ``offline``: whether vLLM's ``LLM`` class is
    used and not its server.  ``per_rank``: times tensor and pipeline parallelism.  ``forced``: vLLM uses
    this value whatever is requested.
    """

    value: Value
    device: Literal["cpu", "gpu"] | None = None
    gpu_gib: int | None = None
    offline: bool | None = None
    per_rank: bool = False
    forced: bool = False


class EnginePack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of releases that schedule alike."""

    engine: Literal["vllm"]
    first: Text
    compared: tuple[Text, ...]
    behaviours: tuple[Text, ...] = ()
    ended: tuple[Text, ...] = ()
    arguments: dict[str, Value | tuple[ArgumentDefault, ...]] = {}  # msgspec copies these
    differs: dict[str, Text] = {}
    grouped: dict[str, tuple[Text, ...]] = {}
    offloading: tuple[Text, ...] = ()
    unequal: dict[str, Text] = {}

    def value_of(self, name: str) -> Value:
        """The default of an argument on an unknown machine."""
        said = self.arguments[name]
        return said[-1].value if isinstance(said, tuple) else said

    def not_simulated(self, given: Mapping[str, object]) -> list[str]:
        """What these releases do with the arguments of a server that the simulated scheduler does not."""
        # Of counts 1 is what there is without the argument.
        used = {
            name
            for name, value in given.items()
            if value is True or (isinstance(value, int) and value > 1) or (isinstance(value, str) and value != "None")
        }
        used |= {f"{name}={value}" for name, value in given.items()}
        return [f"{name}: {what}" for name, what in self.differs.items() if name in used]


@dataclass(frozen=True)
class PackChoice:
    """The pack of a release; ``release``: the compared release it stands for; ``remark``: why that is another."""

    pack: EnginePack
    release: str
    remark: str = ""


@cache
def engine_packs() -> tuple[EnginePack, ...]:
    """All packs, oldest first, each with all that it has of the packs before."""
    files = sorted(FOLDER.glob("*.yaml"))
    packs = [read_yaml(path.read_text("utf-8"), EnginePack, path.name, "a pack", ValueError) for path in files]
    whole: list[EnginePack] = []
    for pack in sorted(packs, key=lambda pack: release_numbers(pack.first)):
        if whole:
            behaviours = tuple(name for name in whole[-1].behaviours if name not in pack.ended) + pack.behaviours
            pack = structs.replace(pack, behaviours=behaviours, arguments=whole[-1].arguments | pack.arguments)
        whole.append(pack)
    return tuple(whole)


def choose_pack(version: str) -> PackChoice:
    """The pack for what a recording calls its vLLM version, and the compared release that is nearest to it."""
    packs, numbers = engine_packs(), release_numbers(version)
    newest = packs[-1].compared[-1]
    if numbers == _UNKNOWN:
        return PackChoice(
            packs[-1], newest, f"vLLM {version[:40]!r} is not a known release: scheduled as the newest, {newest}"
        )
    holding = [pack for pack in packs if release_numbers(pack.first) <= numbers]
    pack = holding[-1] if holding else packs[0]
    compared = {release_numbers(release): release for release in pack.compared}
    if numbers in compared:
        return PackChoice(pack, compared[numbers])
    nearest = compared[max((known for known in compared if known <= numbers), default=min(compared))]
    if numbers > release_numbers(newest):
        problem = "is newer than any that was compared"
    else:
        problem = "itself was not compared" if holding else "is older than any that was compared"
    return PackChoice(pack, nearest, f"vLLM {version[:40]} {problem}: scheduled as {nearest}")


def release_numbers(version: str) -> Release:
    """``(0, 32, 0)`` of ``v0.32.0+cpu``, all 0 of what tells no release."""
    match = _RELEASE.match(version)
    numbers = _UNKNOWN if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
    return _UNKNOWN if numbers < _FIRST_TOLD else numbers


def known_release(version: object) -> Release | None:
    """The numbers of a version; ``None`` where it tells no release."""
    numbers = release_numbers(str(version or ""))
    return None if numbers == _UNKNOWN else numbers


def shown_argument(value: object) -> str:
    """The value of an engine argument, as it is read."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
