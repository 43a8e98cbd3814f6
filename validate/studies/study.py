"""What a study is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from blis_replay.blis.verification.phases import LLAMA_8B_TP2, SECOND_SET, CoefficientSet

Verdict = Literal["confirmed", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("confirmed", "refuted", "inconclusive")

# One run of one configuration: what it measures, by name (``MEASURES`` of its module), from a system (None where
# the measurement needs none) and a seed; or from recordings and the place of one of them.  A function of a module or a
# partial of one, so that a process can get it.
Run = Callable[[Any, int], Mapping[str, float]]

EffectKind = Literal["value", "ratio", "difference", "largest", "smallest", "least_step", "slope", "r2"]


@dataclass(frozen=True)
class Effect:
    """A number made of one measure of some configurations, seed by seed; ``at``: their places on an axis, for lines."""

    kind: EffectKind
    measure: str
    configurations: tuple[str, ...]
    at: tuple[float, ...] = ()


@dataclass(frozen=True)
class Check:
    """An effect and where it has to be: ``least`` and ``most`` belong to what is right, None: no bound.

    ``systems``: those that it applies to, empty: all.
    """

    says: str
    effect: Effect
    least: float | None
    most: float | None
    systems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """What was published for a system: the verdict, None if there was none, and the figures in words."""

    verdict: Verdict | None
    figures: str


@dataclass(frozen=True)
class Study:
    """A hypothesis, what is run to test it, and the rule of the verdict.

    ``systems``: names, or one empty name where the measurement needs none.  ``shown``: measures for the table.
    ``checks``: the hypothesis is confirmed if all are, refuted if one is, else inconclusive.  ``evidence``: what must
    come out for ``explanation``, of why the verdict is not the published one, to count.  ``recorded``: the verdict by
    system that this simulator is known to give.  ``recordings``: what is measured on, by slug or alias; seeds are then
    their places.  ``library``: an optional one that it takes.
    """

    name: str
    title: str
    family: str
    hypothesis: str
    systems: tuple[str, ...]
    seeds: tuple[int, ...]
    configurations: Mapping[str, Run]
    shown: tuple[str, ...]
    checks: tuple[Check, ...]
    evidence: tuple[Check, ...]
    source: str
    published: Mapping[str, Published]
    recorded: Mapping[str, Verdict]
    explanation: str
    recordings: tuple[str, ...] = ()
    library: str = ""


@dataclass(frozen=True)
class System:
    """Coefficients, and the token budget and KV blocks (without vLLM's reserved one) of each engine."""

    name: str
    coefficients: CoefficientSet
    max_num_batched_tokens: int
    kv_blocks: int


_A = System("A", LLAMA_8B_TP2, 2048, 132_139)
_B = System("B", SECOND_SET, 4096, 65_833)

# The last two tell the budget from the coefficients.
SYSTEMS = {
    system.name: system
    for system in (
        _A,
        _B,
        replace(_A, name="A 4096", max_num_batched_tokens=4096),
        replace(_B, name="B 2048", max_num_batched_tokens=2048),
    )
}
