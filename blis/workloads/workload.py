"""What a made-up load is: clients, each with its own arrivals, lengths, prefixes and conversations; and its YAML.

docs/workloads.md describes the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import astuple

from blis_replay.blis.errors import WorkloadError
from blis_replay.blis.workloads.distributions import (
    ArrivalProcess,
    Constant,
    LengthDistribution,
    NonNegative,
    Poisson,
    Positive,
    Tokens,
)
from blis_replay.strict.document import FieldError, Text, read_yaml

MOST_REQUESTS = 5_000_000


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


# -- As YAML -------------------------------------------------------------------------------

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_BY_NAME: dict[str, ArrivalProcess] = {"poisson": Poisson(), "constant": Constant()}


class ClientText(Struct, frozen=True):
    """A client as it is written, under its name; the fields of ``Client`` in its order."""

    rate_per_s: Positive
    arrivals: Literal["poisson", "constant"] | ArrivalProcess
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    prefix: SharedPrefix | None = None
    conversations: Conversations | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0

    def named(self, name: str) -> Client:
        """The client; ``poisson`` or ``constant`` as a word are processes without parameters."""
        rate_per_s, arrivals, *others = astuple(self)
        return Client(name, rate_per_s, _BY_NAME[arrivals] if isinstance(arrivals, str) else arrivals, *others)


class LoadText(Struct, frozen=True, kw_only=True):
    """A load as it is written in a study: a workload without schema and seed."""

    clients: Annotated[dict[str, ClientText], Meta(min_length=1)]
    requests: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)] | None = None
    duration_s: Positive | None = None

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.duration_s is None):
            raise FieldError("requests", "or duration_s, one of them, must say how much to send", "write one of them")

    def workload(self, seed: int) -> Workload:
        """The workload with this seed."""
        clients = tuple(client.named(name) for name, client in self.clients.items())
        return Workload(seed, clients, self.requests, self.duration_s)


class _WorkloadText(LoadText, frozen=True, kw_only=True):
    schema: Literal["blis-replay/workload/1"]
    seed: Seed


def parse_workload(text: str, origin: str) -> Workload:
    """Read a workload from its YAML text; ``origin`` names it in errors.

    Raises ``WorkloadError`` naming the field and what is wrong with it.
    """
    given = read_yaml(text, _WorkloadText, origin, "a workload", WorkloadError)
    return given.workload(given.seed)
