"""Clusters from settings: the mapping of a study, or a router as the command line writes it."""

from __future__ import annotations

from blis_replay.blis.cluster.config import (
    AlwaysBusiest,
    ClusterConfig,
    LeastLoaded,
    Random,
    RoundRobin,
    Router,
    Snapshots,
    TokenBucket,
    Weighted,
)
from blis_replay.blis.errors import TraceError
from blis_replay.blis.release_fields import Fields

MOST_INSTANCES = 1_000
_PLAIN: dict[str, Router] = {
    "round-robin": RoundRobin(),
    "least-loaded": LeastLoaded(),
    "always-busiest": AlwaysBusiest(),
}
_SCORERS = ("prefix_affinity", "queue_depth", "kv_utilization")
ROUTERS = (*_PLAIN, "random", "weighted")


class _RouterFields(Fields):
    document = "a router"
    error = TraceError


def cluster_of(fields: Fields) -> ClusterConfig:
    """``instances``, and where they are given ``router``, ``admission`` and ``snapshots``."""
    return ClusterConfig(
        fields.count("instances", 1, MOST_INSTANCES),
        router_of(fields.mapping("router")) if "router" in fields.values else RoundRobin(),
        _admission(fields.mapping("admission")) if "admission" in fields.values else None,
        _snapshots(fields.mapping("snapshots", optional=True)),
    )


def router_of(fields: Fields) -> Router:
    """``kind``, one of ``ROUTERS``; of a weighted one the weights (those not given are 0), of a random one ``seed``."""
    kind = fields.choice("kind", ROUTERS)
    if kind == "weighted":
        weights = {name: fields.number(name) if name in fields.values else 0.0 for name in _SCORERS}
        fields.refuse_unknown()
        return Weighted(**weights)
    router = _PLAIN.get(kind) or Random(fields.count("seed", 0, 2**32 - 1, optional=True))
    fields.refuse_unknown()
    return router


def router_of_text(text: str) -> Router:
    """A router as ``least-loaded`` or ``weighted:prefix_affinity=3,queue_depth=2``.

    ``weighted`` alone has the weights of BLIS.  Raises ``TraceError`` for what is no router.
    """
    if text == "weighted":
        return Weighted()
    kind, _, rest = text.partition(":")
    values: dict[str, object] = {"kind": kind}
    for setting in rest.split(",") if rest else []:
        name, _, value = setting.partition("=")
        try:
            values[name.strip().replace("-", "_")] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise TraceError(
                f"router {text}: {setting!r} is no weight; write e.g. weighted:prefix_affinity=3,queue_depth=2"
            ) from None
    return router_of(_RouterFields(values, f"router {text}", ""))


def _admission(fields: Fields) -> TokenBucket:
    bucket = TokenBucket(fields.number("capacity_tokens"), fields.number("refill_tokens_per_s"))
    fields.refuse_unknown()
    return bucket


def _snapshots(fields: Fields) -> Snapshots:
    snapshots = Snapshots(fields.count("interval_us", 0, 10**9, optional=True), fields.flag("live_depths"))
    fields.refuse_unknown()
    return snapshots
