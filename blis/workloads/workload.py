"""What a made-up load is: clients, each with its own arrivals, lengths, prefixes and conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from blis_replay.blis.workloads.distributions import ArrivalProcess, LengthDistribution, NonNegative, Tokens
from blis_replay.strict.document import Text


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts that begin alike: with one of ``members`` texts of ``tokens`` tokens, drawn with equal probability.

    ``group``: names the texts; clients that name the same group have the same ones.  ``place``: the text stands
    ``before`` the drawn prompt, which gets longer by it (as in BLIS), or ``within``: it is the prompt's beginning.
    """

    group: Text
    tokens: Tokens
    members: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    place: Literal["before", "within"] = "before"


@dataclass(frozen=True)
class Conversations:
    """Each arrival begins a conversation of ``turns`` requests, ``gap_s`` apart whether answered or not.

    The prompt of a turn is all that was said before, answers included, and what is drawn for it.
    """

    turns: Annotated[int, Meta(ge=1, le=1_000)]
    gap_s: NonNegative


@dataclass(frozen=True)
class Client:
    """One kind of traffic; ``rate_per_s`` counts arrivals, which are conversations where there are such.

    ``priority``: lower is served first by an engine that goes by it.
    """

    name: str
    rate_per_s: float
    arrivals: ArrivalProcess
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    prefix: SharedPrefix | None = None
    conversations: Conversations | None = None
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Clients and how much of their traffic: the first ``requests`` of all, or what arrives within ``duration_s``.

    One of the two is None.
    """

    seed: int
    clients: tuple[Client, ...]
    requests: int | None = None
    duration_s: float | None = None
