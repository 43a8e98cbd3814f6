"""Simulators of other people behind their adapters, and the names that a board is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from blis_replay.base.errors import ReplayError, UnknownNameError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.replay.command import CommandError, CommandSimulator
from blis_replay.replay.program import run_to_end
from blis_replay.replay.simulator import Simulator
from blis_replay.replay.simulators import SimulatorInputs, kind_of, simulator_kinds, simulator_named
from blis_replay_labs.board.adapters import ADAPTERS, run

AS_SHIPPED = "as shipped"
_AS_SHIPPED = CoefficientRelease(AS_SHIPPED, "valid", "What the simulator comes with.", "", "")


def adapted(name: str, inputs: SimulatorInputs) -> CommandSimulator:
    """The simulator of ``dynamo``, ``dynamo-fitted:PYTHON``, ``llmservingsim:TABLE`` and the like, by ``ADAPTERS``.

    ``PYTHON``: where it is installed, by default the Python of this program.  Raises ``CommandError`` for an unknown
    variant or Python, or if the simulator is not installed there.
    """
    asked, _, given = name.partition(":")
    kind, _, variant = asked.partition("-")
    adapter = ADAPTERS[kind]
    installed = bool(adapter.package)
    python, option = (given or sys.executable, variant) if installed else (sys.executable, given)
    found = shutil.which(python)
    if found is None:
        raise CommandError(f"{python}: no such program; give {asked}:PYTHON, the Python in which it is installed")
    if installed and not _is_installed(found, adapter.package):
        raise CommandError(
            f"{adapter.package} is not installed for {python}; pip install {adapter.package}=={adapter.tried} in "
            f"an environment of its own, and give {asked}:PATH/bin/python"
        )
    if installed and variant not in ("", adapter.fitted):
        raise CommandError(
            f"{name}: no such variant; there is {kind}" + (f"-{adapter.fitted}" if adapter.fitted else "")
        )
    release = inputs.release if variant and installed else _AS_SHIPPED
    words = (found, run.__file__, kind, *([option] if option else []))
    label = "-".join(filter(None, (kind, variant))) if installed else f"{kind}:{Path(option).name}"
    return CommandSimulator(words, release, inputs.timeout_s, label=label)


_LOOK_S = 60.0


def _is_installed(python: str, package: str) -> bool:
    """Whether a Python has a package; asked in an empty folder, as Python imports from its working folder first."""
    look = "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])"
    try:
        with tempfile.TemporaryDirectory(prefix="blis-replay-") as folder:
            words = [str(Path(python).absolute()), "-c", look, package]
            return not run_to_end(words, Path(folder), subprocess.DEVNULL, subprocess.DEVNULL, _LOOK_S).code
    except OSError as error:
        raise CommandError(f"{python}: cannot be run ({error.strerror}); give the Python of the simulator") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{python} did not end within {_LOOK_S:g} s; give the Python of the simulator") from None


# ``all``: ours (fitted, and from the datasheet alone), the floors, and others where they are installed.
EVERYONE = (
    *("embedded", "embedded@h100-datasheet", "floor:constant", "floor:line"),
    *("dynamo", "dynamo-fitted", "aiconfigurator", "vidur-fitted", "blis"),
)


def contestants(asked: Sequence[str], inputs: SimulatorInputs) -> tuple[dict[str, Simulator], dict[str, str]]:
    """Simulators by the name that was asked for, and of ``all`` those that are not available, with the reason.

    ``asked``: names for ``simulator_named``, ``all``, or several with commas between them.  Raises what
    ``simulator_named`` raises for a simulator that was named.
    """
    found: dict[str, Simulator] = {}
    absent: dict[str, str] = {}
    next_name = re.compile(rf",(?=all\b|(?:{'|'.join(simulator_kinds())})(?:[-:@,]|$))")
    for name in [name for text in asked for name in next_name.split(text)]:
        for one in EVERYONE if name == "all" else (name,):
            try:
                _refuse_unknown(one)
                simulator = simulator_named(one, inputs)
                found[simulator.name if kind_of(one) in ADAPTERS else one] = simulator
            except ReplayError as error:
                if name != "all":
                    raise
                absent[one] = str(error)
    return found, absent


def _refuse_unknown(name: str) -> None:
    if kind_of(name) not in simulator_kinds():
        wrong = name.rpartition(",")[2]  # a wrong name is not split off by its comma
        close = get_close_matches(wrong, EVERYONE, 1)
        known = f"did you mean {close[0]}?" if close else f"there are all, {', '.join(EVERYONE)} and 'cmd:PATH ARGS'"
        raise UnknownNameError(f"{wrong}: no such simulator; {known}")
