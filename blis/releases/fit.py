"""How the coefficients of a release entry came about: the record of a fit.

Part of it is the range of steps that was fitted on; ``outside`` says how many steps of a run lie beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.document import IF_SET, FieldError, Number, Text, written_as
from blis_replay.blis.kernel.state import BATCH
from blis_replay.blis.latency.models import Latency, Lifecycle, durations_us
from blis_replay.blis.releases.latency import LatencyOfKind
from blis_replay.blis.result import step_parts

Bounds = tuple[Number, Number]


@dataclass(frozen=True)
class StepRange:
    """Smallest and largest of the steps that coefficients were fitted on.

    ``decodes``: decode tokens, of steps that have some; ``context_tokens``: the context of a mean decode, all of it;
    ``prefill_tokens``: of steps that have some.  (0, 0) where there were none.  ``mixes``: prefill tokens, decodes
    and the share of the steps with such a mix, counted by powers of two; empty in older releases.
    """

    decodes: Bounds
    context_tokens: Bounds
    prefill_tokens: Bounds
    mixes: Annotated[tuple[tuple[Number, Number, Number], ...], IF_SET] = ()

    def __post_init__(self) -> None:
        for name in _WORDS:
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise FieldError(name, "does not ascend from 0 on", "write the smallest and the largest")


# Share of steps, or of their time, that changes no mean.
_FEW = 0.01
# Share of steps that may decide a mean.
_MANY = 0.1
# Half of a 95 % interval of costs beyond the fit: KV bytes over bandwidth are believed to within 20 % (one deviation).
_UNSURE = 0.4
# Most steps of a run whose excess over the range is priced.
_MOST_ASKED = 100
# A mix of prefill tokens and decodes is rare if its share of the steps fitted on is this many times smaller.
_RARER = 20.0
_WORDS = {"decodes": "decodes", "context_tokens": "tokens of mean context", "prefill_tokens": "prefill tokens"}


def range_of(steps: Iterable[np.ndarray]) -> StepRange | None:
    """The range of step tables (``SimResult.steps``); None where they have no step."""
    tables = list(steps)
    quantities = [_quantities(table) for table in tables]
    if not any(len(values) for found in quantities for values in found.values()):
        return None
    bounds = {}
    for name in _WORDS:
        values = np.concatenate([found[name] for found in quantities])
        values = values[values > 0]
        bounds[name] = (float(np.floor(values.min())), float(np.ceil(values.max()))) if len(values) else (0.0, 0.0)
    shares = _shares(np.concatenate([_mix(table) for table in tables]))
    mixes = ((*_least(mix), share) for mix, share in shares.items() if share > 0)
    return StepRange(**bounds, mixes=tuple(mixes))


_MIX = ("prefill_tokens", "decode_tokens")
_POWERS = 64  # of two; no step has 2**64 tokens


def _mix(steps: np.ndarray) -> Int64s:
    """int64[steps]: a number for each mix of prefill tokens and decodes, by powers of two; 0 of either is its own."""
    prefill, decodes = (np.frexp(steps[name])[1].astype(np.int64) for name in _MIX)
    return np.asarray(prefill * _POWERS + decodes, np.int64)


def _least(mix: int) -> tuple[int, int]:
    """The fewest prefill tokens and decodes of a mix."""
    prefill, decodes = divmod(mix, _POWERS)
    return 2**prefill // 2, 2**decodes // 2


def _shares(mixes: Int64s) -> dict[int, float]:
    """The share of each mix, to ten-thousandths."""
    found, counts = np.unique(mixes, return_counts=True)
    return dict(zip(found.tolist(), np.round(counts / max(len(mixes), 1), 4).tolist(), strict=True))


@dataclass(frozen=True)
class Outside:
    """Steps of a run beyond the range that coefficients were fitted on.

    ``share``: of all steps.  ``words``: the quantities beyond it.  ``time_share``: the cost of their excess by the
    model, as a share of the time of all steps; nothing measured it.  ``rare_words``: steps within the range, but of a
    mix of prefill tokens and decodes that hardly any step fitted on had; empty where these are few.  ``of``: the server
    that prefilled, if its steps are meant.
    """

    share: float
    words: str
    time_share: float
    rare_words: str = ""
    of: str = ""

    @property
    def matters(self) -> bool:
        """Whether a mean may rest on it: on the cost of the excess, or on the model having no cost for it."""
        return not self.words or (self.share >= _MANY and (self.time_share >= _FEW or not self.time_share))

    @property
    def unsure(self) -> float:
        """How far the mean step may be off for it, either way, as a fraction; 0 where no mean may rest on it."""
        return _UNSURE * self.time_share if self.matters else 0.0

    def __str__(self) -> str:
        """In words, with how far the mean step may be off for that alone."""
        said = "; ".join(words for words in (self._beyond if self.words else "", self.rare_words) if words)
        return f"{self.of}: {said}" if self.of else said

    @property
    def _beyond(self) -> str:
        said = f"{100 * self.share:.0f} % of steps lie outside of what the coefficients were fitted on ({self.words})"
        if self.time_share < _FEW:
            return f"{said}; the model adds {'hardly any' if self.time_share else 'no'} time for it"
        return (
            f"{said}; the model gives this excess {100 * self.time_share:.0f} % of all step time, and no measurement "
            f"backs that; intervals allow for {100 * _UNSURE * self.time_share:.2g} % of the mean step either way"
        )


# Mean context of the decodes of steps -> KV tokens that a mean layer attends to.
Attends = Callable[[Floats], Floats]


def outside(
    steps: np.ndarray, fitted: StepRange, latency: Latency, attends: Attends = lambda context: context
) -> Outside | None:
    """The steps of a run (``SimResult.steps``, of that model) that lie outside; None if fewer than one in a hundred."""
    beyond, ranges = 0, {name: _Beyond() for name in _WORDS}
    for some in step_parts(steps):
        any_of = np.zeros(len(some), np.bool_)
        for name, values in _quantities(some).items():
            low, high = getattr(fitted, name)
            this = (values > 0) & ((values < low) | (values > high))
            any_of |= this
            ranges[name].add(values[this])
        beyond += int(any_of.sum())
    parts = []
    for name, found in ranges.items():
        if found.steps and found.steps >= _FEW * len(steps):
            low, high = getattr(fitted, name)
            reached = " to ".join(dict.fromkeys((f"{found.least:,.0f}", f"{found.most:,.0f}")))
            share = f"{100 * found.steps / len(steps):.0f} %"
            parts.append(f"{share} with {reached} {_WORDS[name]}, fitted on {low:,.0f} to {high:,.0f}")
    rare_words = _rare_words(steps, fitted)
    if not parts:
        return Outside(0.0, "", 0.0, rare_words) if rare_words else None
    return Outside(beyond / len(steps), "; ".join(parts), _time_share(steps, fitted, latency, attends), rare_words)


def _rare_words(steps: np.ndarray, fitted: StepRange) -> str:
    """What share of the steps has a mix that was far rarer among those fitted on; empty where few have, or unknown."""
    known = {(int(prefill), int(decodes)): share for prefill, decodes, share in fitted.mixes}
    seen = _shares(np.concatenate([_mix(some) for some in step_parts(steps)])) if known else {}
    named = {_least(mix): share for mix, share in seen.items()}
    rare = {mix: share for mix, share in named.items() if share >= _FEW and known.get(mix, 0.0) < share / _RARER}
    if sum(rare.values()) < _MANY:
        return ""
    prefill, decodes = most = max(rare, key=lambda mix: rare[mix])
    reached = [max(int(some[of].max(initial=0)) for some in step_parts(steps)) for of in _MIX]
    named_mix = f"{_reaching(prefill, reached[0])} prefill tokens with {_reaching(decodes, reached[1])} decodes"
    return (
        f"{100 * sum(rare.values()):.0f} % of steps have a mix of prefill tokens and decodes that hardly any step "
        f"fitted on has ({100 * rare[most]:.0f} % {named_mix}, of those fitted on {100 * known.get(most, 0.0):.2g} %)"
    )


def _reaching(power: int, most: int) -> str:
    ends = dict.fromkeys((f"{power:,}", f"{min(2 * power - 1, most):,}"))
    return " to ".join(ends) if power > 1 else "one" if power else "no"


@dataclass
class _Beyond:
    """How many steps have a quantity outside its range, and how far they reach."""

    steps: int = 0
    least: float = np.inf
    most: float = -np.inf

    def add(self, values: Floats) -> None:
        self.steps += len(values)
        self.least = min(self.least, float(values.min(initial=np.inf)))
        self.most = max(self.most, float(values.max(initial=-np.inf)))


def _time_share(steps: np.ndarray, fitted: StepRange, latency: Latency, attends: Attends) -> float:
    """The excess over the range by a model, as a share of the time of all steps, by steps from all of the run."""
    some = steps[:: -(-len(steps) // _MOST_ASKED)]
    values = _quantities(some)

    def total_us(quantities: Mapping[str, Floats]) -> float:
        batches = np.zeros(len(some), BATCH)
        batches["prefill_requests"], batches["prefill_tokens"] = some["prefill_requests"], quantities["prefill_tokens"]
        batches["decode_tokens"] = quantities["decodes"]
        batches["context_tokens"] = quantities["decodes"] * attends(quantities["context_tokens"])
        return float(durations_us(latency, batches).sum())

    cut = {name: np.minimum(value, getattr(fitted, name)[1]) for name, value in values.items()}
    return max(1 - total_us(cut) / total_us(values), 0.0)


def _quantities(steps: np.ndarray) -> dict[str, Floats]:
    decodes, context = steps["decode_tokens"].astype(np.float64), steps["context_tokens"].astype(np.float64)
    mean_context = np.divide(context, decodes, out=np.zeros(len(steps)), where=decodes > 0)
    prefill = steps["prefill_tokens"].astype(np.float64)
    return {"decodes": decodes, "context_tokens": mean_context, "prefill_tokens": prefill}


Status = Literal["fitted", "measured", "prior"]
Part = Literal["fit", "choose", "test"]
Scheduling = Literal["asynchronous", "synchronous"]
Told = Literal["asynchronous", "synchronous", "not told apart"]


@dataclass(frozen=True)
class CoefficientFit:
    """A coefficient in us (per token), its bounds of 95 %, and where it comes from.

    ``status``: ``fitted``; ``measured`` (stamps show it); ``prior`` (the recordings do not
    determine it; bounds equal the value).  ``remark``: why, or from what.
    """

    name: Text
    value_us: Number
    low_us: Number
    high_us: Number
    status: Status
    remark: Text


@dataclass(frozen=True)
class PartScore:
    """Signed errors (fractions) of a part of an experiment: of what arrived from one share of the run to another.

    ``errors``: ``e2e``, ``ttft``, ``itl`` of the mean, ``e2e_p99`` and ``ttft_p99``.
    """

    experiment: Text
    part: Part
    begin: Annotated[Number, written_as("from")]
    until: Number
    requests: int
    errors: Mapping[str, Number]

    @property
    def window(self) -> tuple[float, float]:
        """The shares of the run between which its requests arrived."""
        return self.begin, self.until


@dataclass(frozen=True)
class OtherForm:
    """What another form of the step time makes of the same recordings, which do not tell it from the one chosen.

    ``weight``: how far it is believed, as a share of 1.
    """

    form: Text
    weight: Annotated[float, Meta(ge=0, le=1)]
    latency: LatencyOfKind
    lifecycle: Lifecycle


@dataclass(frozen=True)
class Scatter:
    """How long steps took beside what the fit makes of their batches.

    ``step_us``: their mean.  ``by_doubling``: by which share two neighbouring steps lie on either side of their mean,
    root mean square; then two neighbouring pairs of steps, pairs of pairs, and so on up to halves of the run.
    """

    # A step takes 10 us to a day.  No step scatters by twice the mean of all.
    step_us: Annotated[float, Meta(ge=10, le=8.64e10)]
    by_doubling: Annotated[tuple[Annotated[float, Meta(ge=0, le=2)], ...], Meta(min_length=1, max_length=40)]


@dataclass(frozen=True)
class FitRecord:
    """``form`` of the step time, shares of the runs used (``fitted_until``, ``chosen_until``), and what came out.

    The form was chosen by what it scored from ``fitted_until`` to ``chosen_until``, after a fit to what
    is before; then it was fitted to all before ``chosen_until``.  ``scheduling``: the mode of the engine
    that was fitted with; ``scheduling_told``: what the latencies tell, with the evidence in words.  ``steps``: the
    range of the steps fitted on, None in older releases.  ``correlation``: of the fitted coefficients, in their order:
    of the second with the first, of the third with the first two, and so on.  ``other_forms``: see ``draws``.
    ``scatter``: where every step was recorded.
    """

    form: Text
    fitted_until: Number
    chosen_until: Number
    scheduling: Scheduling
    scheduling_told: Told
    scheduling_evidence: Text
    coefficients: tuple[CoefficientFit, ...]
    scores: tuple[PartScore, ...]
    steps: StepRange | None = None
    correlation: Annotated[tuple[tuple[Number, ...], ...], IF_SET] = ()
    other_forms: Annotated[tuple[OtherForm, ...], IF_SET] = ()
    scatter: Scatter | None = None
