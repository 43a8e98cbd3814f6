"""The simulators that a user can choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.store import open_for_reading
from blis_replay.replay.adapters import ADAPTERS
from blis_replay.replay.blis_binary import (
    DEFAULT_TIMEOUT_S,
    BlisBinary,
    find_build,
    own_release,
    restarted_outputs_elsewhere,
)
from blis_replay.replay.command import PREFIX, adapter_simulator, command_simulator
from blis_replay.replay.errors import ReplayError, UnknownNameError
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.floors import PREFIX as FLOOR
from blis_replay.validate.comparison.floors import floor_simulator


def chosen_simulators(
    store: Path, choice: str, release: CoefficientRelease, binary: str, timeout_s: float, own_model: bool
) -> tuple[Simulator, ...]:
    """The simulators of ``embedded``, ``blis``, ``both``, a floor or ``cmd:PATH ARGS``, in the order they are shown.

    ``store``: the file in which a floor finds its recordings.  ``binary`` is looked at only where it is needed.
    ``own_model``: BLIS runs the latency model of its build in place of the release.  Raises ``BlisError`` if there is
    no such binary, or it is no BLIS.
    """
    if choice == "embedded":
        return (EmbeddedEngine(release),)
    if choice.startswith(PREFIX):
        return (command_simulator(choice, release, timeout_s),)
    if _is_of_others(choice):
        return (adapter_simulator(choice, release, timeout_s),)
    if choice.startswith(FLOOR):
        with open_for_reading(store) as opened:
            return (floor_simulator(opened, choice, release),)
    build = find_build(binary)
    blis = BlisBinary(build, own_release(build) if own_model else release, own_model, timeout_s)
    return (blis,) if choice == "blis" else (EmbeddedEngine(release), blis)


def _is_of_others(name: str) -> bool:
    """Whether a name is that of an adapter, with a variant and a path or without."""
    return name.split(":")[0].split("-")[0] in ADAPTERS


def simulator_named(store: Path, name: str, coefficients: str | None, default: str, binary: str | None) -> Simulator:
    """``embedded`` or ``blis`` with a release (``default`` if None; then BLIS runs its own model).

    Raises ``UnknownNameError`` for ``blis`` without a binary, and as ``chosen_simulators`` does.
    """
    if name == "blis" and binary is None:
        raise UnknownNameError("the simulator blis needs --blis-binary PATH")
    release = load_release(coefficients or default)
    (simulator,) = chosen_simulators(store, name, release, binary or "", DEFAULT_TIMEOUT_S, coefficients is None)
    return simulator


def informed(blis: Comparison, embedded: Comparison) -> Comparison:
    """BLIS's comparison; where its build does not count preemptions, with what the embedded engine saw.

    Both were given the same requests and as many blocks.
    """
    simulated, seen = blis.run.simulated, embedded.run.simulated.preemptions
    if simulated.preemptions is not None or not seen:
        return blis
    differences = (*simulated.differences, restarted_outputs_elsewhere(seen))
    simulated = replace(simulated, differences=differences)
    return replace(blis, replay=replace(blis.run, simulated=simulated))


# Those of ``all``: ours fitted and with the datasheet alone, the floors, and others where they are installed.
EVERYONE = (
    *("embedded", "embedded@h100-datasheet", "floor:constant", "floor:line"),
    *("dynamo", "dynamo-fitted", "aiconfigurator", "vidur-fitted", "blis"),
)
_NEXT = re.compile(rf",(?=all\b|embedded|floor:|cmd:|blis\b|{'|'.join(ADAPTERS)})")


def contestants(
    store: Path, asked: Sequence[str], release: CoefficientRelease, binary: str | None, timeout_s: float
) -> tuple[dict[str, Simulator], dict[str, str]]:
    """Simulators by the name that was asked for, and of ``all`` those that there are not, with the reason.

    ``asked``: names as of ``chosen_simulators``, ``embedded@RELEASE``, ``all``, or several with commas between them.
    Raises what ``chosen_simulators`` raises for a simulator that was named.
    """
    found: dict[str, Simulator] = {}
    absent: dict[str, str] = {}
    for name in [name for text in asked for name in _NEXT.split(text)]:
        for one in EVERYONE if name == "all" else (name,):
            try:
                simulator = _contestant(store, one, release, binary, timeout_s)
                found[simulator.name if _is_of_others(one) else one] = simulator
            except ReplayError as error:
                if name != "all":
                    raise
                absent[one] = str(error)
    return found, absent


def _contestant(store: Path, name: str, release: CoefficientRelease, binary: str | None, timeout_s: float) -> Simulator:
    kind, _, chosen = name.partition("@")
    if kind == "embedded" and chosen:
        release = load_release(chosen)
        release.refuse_if_invalid()
        return EmbeddedEngine(release)
    if kind == "blis" and binary is None:
        raise UnknownNameError("the simulator blis needs --blis-binary PATH")
    if kind not in ("embedded", "blis") and not name.startswith((FLOOR, PREFIX)) and not _is_of_others(name):
        raise UnknownNameError(f"{name}: no such simulator; there are all, {', '.join(EVERYONE)} and 'cmd:PATH ARGS'")
    (simulator,) = chosen_simulators(store, name, release, binary or "", timeout_s, own_model=True)
    return simulator
