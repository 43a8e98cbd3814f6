"""Add-ons: what other distributions, such as our labs, plug into this one.

An add-on is an entry point of the group ``blis_replay.addons`` with a name ``SOCKET.NAME``, e.g. ``verb.study``::

    verb         a click command; the name of a group of verbs, e.g. ``coefficients``: a command in that group
    simulator    a function that makes a simulator from its name and ``SimulatorInputs`` (replay/simulators.py)
    compare      what ``blis-replay compare --simulators`` and ``--published`` answer
    simulate     what ``blis-replay simulate`` answers: ``requests`` for ``--engine``, ``find`` for ``--find``,
                 ``export`` for ``--to``
    requests     the type of ``DeclaredRequests`` (replay/declared.py) for a kind of ``--replay arrivals=KIND``
    latency      the type of latency models of a kind (``blis.releases.latency``); its step time is a function that
                 the kernel calls (``blis.kernel.step_time.registered``)
    format       a ``RequestFormat`` (ingest/readers/formats.py) of request records
    fit          what ``blis-replay calibrate --operators`` fits with
    make         what ``blis-replay coefficients make --operators`` makes
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from blis_replay.base.errors import BlisReplayError, MissingExtraError

_GROUP = "blis_replay.addons"


@cache
def addons(socket: str) -> dict[str, EntryPoint]:
    """The add-ons installed for a socket, by name, without importing them."""
    before = f"{socket}."
    plugged = sorted(entry_points(group=_GROUP), key=lambda point: point.name)
    return {point.name.removeprefix(before): point for point in plugged if point.name.startswith(before)}


def loaded(point: EntryPoint) -> Any:
    """The object that an add-on names; ``BlisReplayError`` where its distribution does not fit this one."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        owner = "its distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        raise BlisReplayError(
            f"add-on {point.name} of {owner} cannot be loaded ({error}); install the version made for this one"
        ) from error


def addon(socket: str, name: str) -> Any | None:
    """The object of an add-on; None if it is not installed."""
    point = addons(socket).get(name)
    return None if point is None else loaded(point)


def in_labs(what: str) -> str:
    """The message for something that only our labs have."""
    return f"{what} needs the labs; install them with `pip install ./labs` in a clone"


def needed_addon(socket: str, name: str, what: str) -> Any:
    """The object of an add-on of our labs; raises ``MissingExtraError`` naming ``what`` if they are not installed."""
    plugged = addon(socket, name)
    if plugged is None:
        raise MissingExtraError(in_labs(what))
    return plugged
