"""A cluster: equal engines behind a router.  Routers are read from text such as ``weighted:queue_depth=2``.

Names and rules are those of blis-semantics, section 4; a rule of ours is marked so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import astuple

from blis_replay.base.document import Number, read_values
from blis_replay.base.errors import TraceError


class RoundRobin(Struct, frozen=True):
    """Instance 0, 1, ..., and 0 again."""


class Random(Struct, frozen=True):
    """Every instance with the same probability, from a seed.  BLIS has no such router."""

    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class LeastLoaded(Struct, frozen=True):
    """The instance with the least load; the first of them on a tie."""


class AlwaysBusiest(Struct, frozen=True):
    """The instance with the greatest load, the first on a tie: what a router must never do."""


class Weighted(Struct, frozen=True):
    """The instance with the greatest weighted mean of scores within 0 and 1; the first on a tie.

    ``prefix_affinity``: share of the prompt's full blocks, from the first on, that the router remembers to have
    sent there (``ROUTER_MEMORY_BLOCKS`` of each instance, the least recently sent forgotten).  ``queue_depth``: 1
    for the least load, 0 for the greatest, linear between; 1 for all if they are equal.  ``kv_utilization``: share
    of KV blocks that are free.
    """

    prefix_affinity: Number = 3.0
    queue_depth: Number = 2.0
    kv_utilization: Number = 2.0

    def __post_init__(self) -> None:
        weights = astuple(self)
        if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise TraceError(f"weights of the router are {weights}; none may be negative, and one must be positive")


Router = RoundRobin | Random | LeastLoaded | AlwaysBusiest | Weighted

ROUTER_MEMORY_BLOCKS = 10_000


@dataclass(frozen=True)
class ClusterConfig:
    """``instances`` equal engines behind a router."""

    instances: int
    router: Router = field(default_factory=RoundRobin)

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise TraceError(f"a cluster of {self.instances} instances; it needs at least 1")


# -- Read from text --------------------------------------------------------------------------


_ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "always-busiest": AlwaysBusiest,
    "weighted": Weighted,
}


def router_of_text(text: str) -> Router:
    """A router as ``least-loaded`` or ``weighted:prefix_affinity=3,queue_depth=2``.

    ``weighted`` alone has the weights of BLIS; beside given ones the others are 0.  Raises ``TraceError`` for what is
    not a router.
    """
    kind, _, rest = text.partition(":")
    if kind not in _ROUTERS:
        raise TraceError(f"router {text}: {kind!r} is not a router; use one of {', '.join(_ROUTERS)}")
    values: dict[str, object] = dict.fromkeys(Weighted.__struct_fields__, 0.0) if kind == "weighted" and rest else {}
    for setting in rest.split(",") if rest else []:
        name, _, value = setting.partition("=")
        try:
            values[name.strip().replace("-", "_")] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise TraceError(
                f"router {text}: {setting!r} is not a weight; write e.g. weighted:prefix_affinity=3,queue_depth=2"
            ) from None
    return read_values(values, _ROUTERS[kind], f"router {text}", "a router", TraceError)
