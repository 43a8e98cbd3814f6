"""Which simulator a name stands for: our engine, the BLIS binary, a command, or one that an add-on brings.

A name is ``KIND``, ``KIND-VARIANT``, ``KIND:WHERE`` or ``KIND@WHICH``; the kind decides who makes the simulator.  An
add-on plugs in as ``simulator.KIND`` (base/addons.py), a function like ``embedded`` below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blis_replay.base.addons import addon, addons, in_labs
from blis_replay.base.errors import UnknownNameError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulator


@dataclass(frozen=True)
class SimulatorInputs:
    """What a simulator can be made of.

    ``release``: its coefficients.  ``store``: the file of stored experiments, for one that is fitted to some of them.
    ``blis_binary``: the path of the BLIS binary, None if not given.  ``blis_model``: ``release`` has BLIS run the
    release, ``own`` the latency model that its build runs by default, any other name that model of the build.
    """

    release: CoefficientRelease
    store: Path
    timeout_s: float = 600.0
    blis_binary: str | None = None
    blis_model: str = "own"


def embedded(name: str, inputs: SimulatorInputs) -> Simulator:
    """``embedded``, or ``embedded@RELEASE`` with another release."""
    _, _, other = name.partition("@")
    release = load_release(other) if other else inputs.release
    release.refuse_if_invalid()
    return EmbeddedEngine(release)


def blis(name: str, inputs: SimulatorInputs) -> Simulator:
    """``blis``, or ``blis-MODEL`` with a latency model of the build; ``BlisError`` if the build is not BLIS."""
    from blis_replay.replay.blis_binary import BlisBinary, find_build, own_release

    if inputs.blis_binary is None:
        raise UnknownNameError(f"no BLIS binary is named for {name}; give --blis-binary PATH")
    build = find_build(inputs.blis_binary)
    model = name.partition("-")[2] or ("" if inputs.blis_model == "release" else inputs.blis_model)
    return BlisBinary(build, own_release(build, model) if model else inputs.release, model, inputs.timeout_s, name)


def command(name: str, inputs: SimulatorInputs) -> Simulator:
    """``cmd:PATH ARGS``; ``CommandError`` if the program is missing."""
    from blis_replay.replay.command import command_simulator

    return command_simulator(name, inputs.release, inputs.timeout_s)


def submission(name: str, inputs: SimulatorInputs) -> Simulator:
    """``zip:FILE``: stored answers of a command; ``CommandError`` if the file is missing."""
    from blis_replay.replay.submission import submission_simulator

    return submission_simulator(name, inputs.release)


_OURS: dict[str, Callable[[str, SimulatorInputs], Simulator]] = {
    **{"embedded": embedded, "blis": blis, "cmd": command, "zip": submission}
}
# Kinds that our labs bring.
_LABS = ("floor", "dynamo", "aiconfigurator", "vidur", "llmservingsim")


def kind_of(name: str) -> str:
    """The kind in a simulator's name: ``floor`` of ``floor:line@34b-codegen``."""
    return re.split("[-:@]", name, maxsplit=1)[0]


def simulator_kinds() -> tuple[str, ...]:
    """The kinds that can be named here: ours, then those of add-ons."""
    return (*_OURS, *addons("simulator"))


def simulator_named(name: str, inputs: SimulatorInputs) -> Simulator:
    """The simulator of a name; raises ``UnknownNameError`` for an unknown kind, and what its maker raises."""
    kind = kind_of(name)
    make = _OURS.get(kind) or addon("simulator", kind)
    if make is None:
        raise UnknownNameError(f"{name}: {why_unknown(kind)}")
    simulator: Simulator = make(name, inputs)
    return simulator


def why_unknown(kind: str) -> str:
    """Why no simulator of a kind can be named, and what to do."""
    if kind in _LABS:
        return in_labs("this simulator")
    return f"no such simulator; there are {', '.join(simulator_kinds())}"
