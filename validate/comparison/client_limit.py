"""Load generators that keep a number of requests in flight: their arrivals follow the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording

# In flight at its largest number for so much of the time: a client that sends when another is done.
_LIMITED_SHARE = 0.5
_FEWEST = 20


@dataclass(frozen=True)
class ClientLimit:
    """A load generator that sent only when another request was done: its limit, reached first at ``from_us``.

    ``stage``: the load stage in which it did, None where stages are not known.
    """

    stage: int | None
    in_flight: int
    from_us: int


def in_flight_at(recording: Recording, time_us: int) -> int:
    """Requests that were sent by then, and neither done nor given up, as recorded."""
    sent_us, done_us = _sent_and_done(recording.requests)
    return int(((sent_us <= time_us) & (done_us > time_us)).sum())


def client_limits(recording: Recording) -> tuple[ClientLimit, ...]:
    """The number of requests in flight at which the client stood for most of a load stage, where there is one.

    Between the first time at its largest number and the last arrival of the stage.
    """
    stages = recording.requests.group_by("stage", maintain_order=True)
    limits = (_client_limit(stage, requests) for (stage,), requests in stages)
    return tuple(limit for limit in limits if limit is not None)


def _client_limit(stage: int | None, requests: pl.DataFrame) -> ClientLimit | None:
    sent_us, done_us = _sent_and_done(requests)
    if len(sent_us) < _FEWEST:
        return None
    # Of what is sent when another is done, the end comes first.
    times_us = np.concatenate([done_us, sent_us])
    order = np.argsort(times_us, kind="stable")
    in_flight = np.cumsum(np.repeat([-1, 1], len(sent_us))[order])
    largest = int(in_flight.max())
    first = int(np.argmax(in_flight == largest))
    until_us = np.minimum(times_us[order], sent_us.max())
    lasted_us = np.diff(until_us, append=sent_us.max())
    if lasted_us[in_flight == largest].sum() <= _LIMITED_SHARE * lasted_us[first:].sum():
        return None
    return ClientLimit(stage, largest, int(until_us[first]))


def _sent_and_done(requests: pl.DataFrame) -> tuple[Int64s, Int64s]:
    requests = requests.drop_nulls(["arrival_us", "e2e_us"])
    sent_us = requests["arrival_us"].to_numpy().astype(np.int64)
    return sent_us, sent_us + requests["e2e_us"].to_numpy().astype(np.int64)
