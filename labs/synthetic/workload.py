"""Synthetic workloads: clients with arrivals, lengths, prefixes and conversations, as YAML.

labs/synthetic/README.md describes the file.  Arrival processes differ in how much the gaps between arrivals vary; CV is
their standard deviation over their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.document import FieldError, Text, read_yaml
from blis_replay.base.errors import SimulatorError


class WorkloadError(SimulatorError):
    """A workload that is malformed, or too large to make."""


MOST_TOKENS = 10_000_000
_MOST = 1e9
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Positive = Annotated[float, Meta(ge=1e-9, le=_MOST)]
NonNegative = Annotated[float, Meta(ge=0, le=_MOST)]
Variation = Annotated[float, Meta(ge=0.01, le=30)]


class Poisson(Struct, frozen=True, tag_field="process", tag="poisson"):
    """Exponential gaps: CV 1."""


class Constant(Struct, frozen=True, tag_field="process", tag="constant"):
    """Equal gaps: CV 0."""


class Gamma(Struct, frozen=True, tag_field="process", tag="gamma"):
    """Gamma gaps of shape ``1 / cv**2``: bursts for a CV above 1."""

    cv: Variation


class Weibull(Struct, frozen=True, tag_field="process", tag="weibull"):
    """Weibull gaps; the shape is the one that has this CV."""

    cv: Variation


class OnOff(Struct, frozen=True, tag_field="process", tag="on-off"):
    """Poisson while on, silent while off, in turn, beginning on; the rate while on makes up for the silence."""

    on_s: Positive
    off_s: Positive


ArrivalProcess = Poisson | Constant | Gamma | Weibull | OnOff


def arrival_times_us(process: ArrivalProcess, rate_per_s: float, count: int, random: np.random.Generator) -> Floats:
    """float64[count]: ascending arrival times in us at this mean rate; the first one is a gap after 0.

    The first k of them do not depend on ``count``.
    """
    mean_us = 1e6 / rate_per_s
    if isinstance(process, OnOff):
        share_on = process.on_s / (process.on_s + process.off_s)
        busy_us = np.cumsum(random.exponential(mean_us * share_on, count))
        return busy_us + np.floor(busy_us / (process.on_s * 1e6)) * (process.off_s * 1e6)
    return np.cumsum(_gaps_us(process, mean_us, count, random))


def weibull_shape(cv: float) -> float:
    """The shape k of a Weibull distribution of this CV: ``1 + cv**2 = G(1 + 2/k) / G(1 + 1/k)**2``, by bisection."""
    low, high = 0.05, 1_000.0
    for _ in range(200):
        middle = (low * high) ** 0.5
        if lgamma(1 + 2 / middle) - 2 * lgamma(1 + 1 / middle) > np.log1p(cv * cv):
            low = middle
        else:
            high = middle
    return low


def _gaps_us(process: ArrivalProcess, mean_us: float, count: int, random: np.random.Generator) -> Floats:
    if isinstance(process, Gamma):
        return random.gamma(process.cv**-2, mean_us * process.cv**2, count)
    if isinstance(process, Weibull):
        shape = weibull_shape(process.cv)
        return random.weibull(shape, count) * (mean_us / exp(lgamma(1 + 1 / shape)))
    if isinstance(process, Constant):
        return np.full(count, mean_us)
    return random.exponential(mean_us, count)


def _refuse_empty_range(least: int, most: int) -> None:
    if least > most:
        raise FieldError("min", f"is above max, {most:,}", "correct one of them")


class Fixed(Struct, frozen=True, tag_field="distribution", tag="constant"):
    """Always the same."""

    value: Tokens


class Uniform(Struct, frozen=True, tag_field="distribution", tag="uniform"):
    """Every whole number from ``min`` to ``max`` with the same probability."""

    min: Tokens = 1
    max: Tokens = MOST_TOKENS

    def __post_init__(self) -> None:
        _refuse_empty_range(self.min, self.max)


class _Clipped(Struct, frozen=True, kw_only=True):
    """Limits that lengths are clipped to."""

    min: Tokens = 1
    max: Tokens = MOST_TOKENS

    def __post_init__(self) -> None:
        _refuse_empty_range(self.min, self.max)


class Normal(_Clipped, frozen=True, tag_field="distribution", tag="normal"):
    """Normal, clipped to ``min`` and ``max`` and rounded (``gaussian`` of blis-semantics, section 5)."""

    mean: Positive
    deviation: NonNegative


class Lognormal(_Clipped, frozen=True, tag_field="distribution", tag="lognormal"):
    """Lognormal of this mean and standard deviation, clipped to ``min`` and ``max`` and rounded."""

    mean: Positive
    deviation: NonNegative


class Exponential(_Clipped, frozen=True, tag_field="distribution", tag="exponential"):
    """Exponential of this mean, clipped to ``min`` and ``max`` and rounded."""

    mean: Positive


class Empirical(Struct, frozen=True, tag_field="distribution", tag="empirical"):
    """One of ``values`` each, with probabilities in proportion to ``weights``."""

    values: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    weights: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.weights):
            problem = f"are {len(self.weights)} for {len(self.values)} values"
            raise FieldError("weights", problem, "give one for each")
        if not 0 < sum(self.weights) < _MOST:
            raise FieldError("weights", f"add up to {sum(self.weights):g}", "let one be positive")


LengthDistribution = Fixed | Uniform | Normal | Lognormal | Exponential | Empirical


def draw_lengths(distribution: LengthDistribution, count: int, random: np.random.Generator) -> Int64s:
    """int64[count]: tokens, at least 1; the first k of them do not depend on ``count``."""
    if isinstance(distribution, Fixed):
        return np.full(count, distribution.value, np.int64)
    if isinstance(distribution, Uniform):
        # One real number per draw, so that a longer draw begins like a shorter one.
        span = distribution.max - distribution.min + 1
        return distribution.min + np.floor(random.random(count) * span).astype(np.int64)
    if isinstance(distribution, Empirical):
        edges = np.cumsum(distribution.weights)
        places = np.searchsorted(edges, random.random(count) * edges[-1], side="right")
        chosen: Int64s = np.array(distribution.values, np.int64)[np.minimum(places, len(edges) - 1)]
        return chosen
    if isinstance(distribution, Normal):
        drawn = random.normal(distribution.mean, distribution.deviation, count)
    elif isinstance(distribution, Lognormal):
        variance = np.log1p((distribution.deviation / distribution.mean) ** 2)
        drawn = random.lognormal(np.log(distribution.mean) - variance / 2, np.sqrt(variance), count)
    else:
        drawn = random.exponential(distribution.mean, count)
    tokens: Int64s = np.rint(np.clip(drawn, distribution.min, distribution.max)).astype(np.int64)
    return tokens


MOST_REQUESTS = 5_000_000


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts begin with one of ``members`` texts of ``tokens`` tokens, drawn with equal probability.

    ``group``: clients with the same group share its texts.  ``place``: ``before`` puts the text in front of the drawn
    prompt, which gets longer by it (as in BLIS); ``within`` makes it the beginning of the drawn prompt.
    """

    group: Text
    tokens: Tokens
    members: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    place: Literal["before", "within"] = "before"


@dataclass(frozen=True)
class Conversations:
    """Each arrival begins a conversation of ``turns`` requests, ``gap_s`` apart whether answered or not.

    The prompt of a turn is the whole conversation so far, with all answers, followed by the drawn prompt.
    """

    turns: Annotated[int, Meta(ge=1, le=1_000)]
    gap_s: NonNegative


Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_BY_NAME: dict[str, ArrivalProcess] = {"poisson": Poisson(), "constant": Constant()}


class Client(Struct, frozen=True):
    """One kind of traffic; ``rate_per_s`` counts arrivals, or conversations where it has them.

    ``priority``: a priority scheduler serves lower values first.
    """

    rate_per_s: Positive
    arrivals: Literal["poisson", "constant"] | ArrivalProcess
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    prefix: SharedPrefix | None = None
    conversations: Conversations | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0

    @property
    def process(self) -> ArrivalProcess:
        """The arrival process; a word names one without parameters."""
        return _BY_NAME[self.arrivals] if isinstance(self.arrivals, str) else self.arrivals


class Workload(Struct, frozen=True, kw_only=True):
    """Clients by name, and how much of their traffic: ``requests`` in all, or what arrives within ``duration_s``."""

    clients: Annotated[dict[str, Client], Meta(min_length=1)]
    requests: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)] | None = None
    duration_s: Positive | None = None

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.duration_s is None):
            raise FieldError("requests", "or duration_s, one of them, must say how much to send", "write one of them")

    @property
    def duration_us(self) -> int | None:
        """The duration in whole microseconds: as a float, 1.000007 s times 1e6 is a little more than 1,000,007."""
        return None if self.duration_s is None else round(self.duration_s * 1e6)


class WorkloadFile(Workload, frozen=True, kw_only=True):
    """A workload with the seed of its draws, as a YAML file has it."""

    schema: Literal["blis-replay/workload/1"]
    seed: Seed


def parse_workload(text: str, origin: str) -> WorkloadFile:
    """Read a workload from its YAML text; ``origin`` names it in errors.

    Raises ``WorkloadError`` naming the field and what is wrong with it.
    """
    return read_yaml(text, WorkloadFile, origin, "a workload", WorkloadError)
