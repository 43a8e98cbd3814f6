"""What each release of a serving engine does: packs, one YAML file each in ``fixtures/engines``.

A pack holds from its ``first`` release to the next pack's.  ``behaviours`` are the switches of the simulated scheduler
(``blis.trace.Behaviours``) that these releases have; ``arguments``, what an engine argument is that nobody gives.
``differs``: arguments with which these releases do what is not simulated, and what that is.  ``compared``: the releases
whose own scheduler was run beside the simulated one (docs/engine.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from blis_replay.strict.document import Text, read_yaml

FOLDER = Path(__file__).parents[1] / "fixtures" / "engines"
# Only the numbers: of 0.32.1rc1.dev7+g12ab34 they are 0.32.1.
_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")

Release = tuple[int, int, int]
_UNKNOWN: Release = (0, 0, 0)


class EnginePack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of releases that schedule alike."""

    engine: Literal["vllm"]
    first: Text
    compared: tuple[Text, ...]
    behaviours: tuple[Text, ...] = ()
    arguments: dict[str, bool | int | float | None] = {}  # msgspec copies these
    differs: dict[str, Text] = {}

    def not_simulated(self, given: Mapping[str, object]) -> list[str]:
        """What these releases do with the arguments of a server that the simulated scheduler does not."""
        # Of counts 1 is what there is without the argument.
        used = {
            name
            for name, value in given.items()
            if value is True or (isinstance(value, int) and value > 1) or (isinstance(value, str) and value != "None")
        }
        return [f"{name}: {what}" for name, what in self.differs.items() if name in used]


@dataclass(frozen=True)
class PackChoice:
    """The pack of a release; ``release``: the compared release it stands for; ``remark``: why that is another."""

    pack: EnginePack
    release: str
    remark: str = ""


@cache
def engine_packs() -> tuple[EnginePack, ...]:
    """All packs, oldest first."""
    packs = [read_yaml(path.read_text("utf-8"), EnginePack, path.name, "a pack", ValueError) for path in _files()]
    return tuple(sorted(packs, key=lambda pack: release_numbers(pack.first)))


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"))


def choose_pack(version: str) -> PackChoice:
    """The pack for what a recording calls its vLLM version, and the compared release that is nearest to it."""
    packs, numbers = engine_packs(), release_numbers(version)
    newest = packs[-1].compared[-1]
    if numbers == _UNKNOWN:
        return PackChoice(packs[-1], newest, f"vLLM {version[:40]!r} is no release: scheduled as the newest, {newest}")
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
    """``(0, 32, 0)`` of ``v0.32.0+cpu``, all 0 of what is no version."""
    match = _RELEASE.match(version)
    return _UNKNOWN if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
