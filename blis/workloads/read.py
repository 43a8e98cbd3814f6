"""A workload from its YAML (docs/workloads.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from blis_replay.blis.errors import WorkloadError
from blis_replay.blis.release_fields import Fields
from blis_replay.blis.workloads.arrivals import ArrivalProcess, Constant, Gamma, OnOff, Poisson, Weibull
from blis_replay.blis.workloads.client_requests import MOST_REQUESTS
from blis_replay.blis.workloads.lengths import (
    MOST_TOKENS,
    Empirical,
    Exponential,
    Fixed,
    LengthDistribution,
    Lognormal,
    Normal,
    Uniform,
)
from blis_replay.blis.workloads.workload import Client, Conversations, SharedPrefix, Workload

SCHEMA = "blis-replay/workload/1"
MOST_SEED = 2**32 - 1
_PLACES: tuple[Literal["before", "within"], ...] = ("before", "within")
_MOST = 1e9


class _WorkloadFields(Fields):
    document = "a workload"
    error = WorkloadError


def parse_workload(text: str, origin: str) -> Workload:
    """Read a workload from its YAML text; ``origin`` names it in errors.

    Raises ``WorkloadError`` naming the field and what is wrong with it.
    """
    top = _WorkloadFields.of_yaml(text, origin)
    if top.text("schema") != SCHEMA:
        top.refuse("schema", f"is not {SCHEMA!r}", "this program reads no other")
    return workload_of(top, top.count("seed", 0, MOST_SEED))


def workload_of(fields: Fields, seed: int) -> Workload:
    """The workload that a mapping describes, without schema and seed."""
    by_name = fields.mapping("clients")
    clients = tuple(_client(name, by_name.mapping(name)) for name in by_name.values)
    if not clients:
        fields.refuse("clients", "is empty", "describe at least one")
    if ("requests" in fields.values) == ("duration_s" in fields.values):
        fields.refuse("requests", "or duration_s, one of them, must say how much to send", "write one of them")
    requests = fields.count("requests", 1, MOST_REQUESTS) if "requests" in fields.values else None
    duration_s = None if requests is not None else _positive(fields, "duration_s")
    fields.refuse_unknown()
    return Workload(seed, clients, requests, duration_s)


def _client(name: str, fields: Fields) -> Client:
    client = Client(
        name=name,
        rate_per_s=_positive(fields, "rate_per_s"),
        arrivals=_arrivals(fields),
        prompt_tokens=_lengths(fields.mapping("prompt_tokens")),
        output_tokens=_lengths(fields.mapping("output_tokens")),
        prefix=_prefix(fields.mapping("prefix")) if "prefix" in fields.values else None,
        conversations=_conversations(fields.mapping("conversations")) if "conversations" in fields.values else None,
        priority=fields.count("priority", -1_000_000, 1_000_000, optional=True),
    )
    fields.refuse_unknown()
    return client


def _arrivals(client: Fields) -> ArrivalProcess:
    """``poisson`` or ``constant`` as a word, the others with their parameters."""
    if isinstance(client.values.get("arrivals"), str):
        return Poisson() if client.choice("arrivals", ("poisson", "constant")) == "poisson" else Constant()
    fields = client.mapping("arrivals")
    kind = fields.choice("process", ("poisson", "constant", "gamma", "weibull", "on-off"))
    process: ArrivalProcess
    if kind == "on-off":
        process = OnOff(_positive(fields, "on_s"), _positive(fields, "off_s"))
    elif kind == "gamma":
        process = Gamma(_between(fields, "cv", 0.01, 30))
    elif kind == "weibull":
        process = Weibull(_between(fields, "cv", 0.01, 30))
    else:
        process = Poisson() if kind == "poisson" else Constant()
    fields.refuse_unknown()
    return process


def _lengths(fields: Fields) -> LengthDistribution:
    kind = fields.choice("distribution", tuple(_READERS))
    distribution = _READERS[kind](fields)
    fields.refuse_unknown()
    return distribution


def _fixed(fields: Fields) -> LengthDistribution:
    return Fixed(fields.count("value", 1, MOST_TOKENS))


def _uniform(fields: Fields) -> LengthDistribution:
    return Uniform(*_range(fields))


def _normal(fields: Fields) -> LengthDistribution:
    return Normal(_positive(fields, "mean"), _between(fields, "deviation", 0, _MOST), *_range(fields))


def _lognormal(fields: Fields) -> LengthDistribution:
    return Lognormal(_positive(fields, "mean"), _between(fields, "deviation", 0, _MOST), *_range(fields))


def _exponential(fields: Fields) -> LengthDistribution:
    return Exponential(_positive(fields, "mean"), *_range(fields))


def _empirical(fields: Fields) -> LengthDistribution:
    values, weights = _numbers(fields, "values"), _numbers(fields, "weights")
    if len(values) != len(weights) or not values:
        fields.refuse("weights", f"are {len(weights)} for {len(values)} values", "give one for each of at least one")
    if any(value != int(value) or not 1 <= value <= MOST_TOKENS for value in values):
        fields.refuse("values", f"are not all whole numbers from 1 to {MOST_TOKENS:,}", "correct them")
    if min(weights) < 0 or not 0 < sum(weights) < _MOST:
        fields.refuse("weights", "are negative, or their sum is 0", "correct them")
    return Empirical(tuple(int(value) for value in values), weights)


_READERS: dict[str, Callable[[Fields], LengthDistribution]] = {
    "constant": _fixed,
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "empirical": _empirical,
}


def _prefix(fields: Fields) -> SharedPrefix:
    prefix = SharedPrefix(
        group=fields.text("group"),
        tokens=fields.count("tokens", 1, MOST_TOKENS),
        members=fields.count("members", 1, 1_000_000) if "members" in fields.values else 1,
        place=fields.choice("place", _PLACES) if "place" in fields.values else "before",
    )
    fields.refuse_unknown()
    return prefix


def _conversations(fields: Fields) -> Conversations:
    conversations = Conversations(fields.count("turns", 1, 1_000), _between(fields, "gap_s", 0, _MOST))
    fields.refuse_unknown()
    return conversations


def _range(fields: Fields) -> tuple[int, int]:
    """``min`` and ``max``, 1 and no bound where they are not given."""
    low = fields.count("min", 1, MOST_TOKENS) if "min" in fields.values else 1
    high = fields.count("max", 1, MOST_TOKENS) if "max" in fields.values else MOST_TOKENS
    if low > high:
        fields.refuse("min", f"is above max, {high}", "correct one of them")
    return low, high


def _positive(fields: Fields, name: str) -> float:
    return _between(fields, name, 1e-9, _MOST)


def _between(fields: Fields, name: str, low: float, high: float) -> float:
    value = fields.number(name)
    if not low <= value <= high:
        fields.refuse(name, f"is not within {low:g} and {high:g}", "correct it")
    return value


def _numbers(fields: Fields, name: str) -> tuple[float, ...]:
    fields.seen.add(name)
    values = fields.values.get(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST for value in values
    ):
        fields.refuse(name, "is missing or no list of numbers", "write e.g. [1, 2, 3]")
    return tuple(float(value) for value in values)
