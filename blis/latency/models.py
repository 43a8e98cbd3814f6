"""Latency models: how long a step takes, and the delays around the engine.

A model is data, and the kernel gets it as arrays.  Linear coefficients are integer
nanoseconds, so that a step time is exact and the same on every machine.  Annotations say how a
release writes a field (``base.document``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from inspect import unwrap
from itertools import chain
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from msgspec import Meta
from msgspec import inspect as types

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.document import (
    IF_SET,
    REQUIRED,
    UNWRITTEN,
    FieldError,
    NonNegativeWholeTime,
    Number,
    Text,
    Time,
    TimeNs,
    TimeNsPerToken,
    TimePerToken,
    shown,
    written_as,
)
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.kernel import step_time
from blis_replay.blis.kernel.state import BATCH
from blis_replay.blis.kernel.step_time import FEATURE_NAMES, KernelModel


@runtime_checkable
class Latency(Protocol):
    """A latency model of any kind."""

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them; ``ReleaseError`` if it has none."""


@runtime_checkable
class PaddedLatency(Latency, Protocol):
    """A latency model that has times of padded batches."""

    def with_captured(self, sizes: tuple[int, ...]) -> Latency:
        """The model on a server that captured CUDA graphs of these sizes."""


def durations_us(model: Latency, batches: Sequence[Mapping[str, int]] | np.ndarray) -> Floats:
    """float64[n]: how long batches take by the model; a batch: fields of ``kernel.state.BATCH``, 0 where left out."""
    table, us = np.zeros(len(batches), BATCH), np.zeros(len(batches), np.int64)
    if isinstance(batches, np.ndarray):
        table = batches
    else:
        for row, batch in zip(table, batches, strict=True):
            for name, value in batch.items():
                row[name] = value
    step_time.step_durations_us(*model.for_kernel(), table, us)
    return us.astype(np.float64)


def refuse_unknown_features(field: str, names: Sequence[str]) -> None:
    """Raise ``FieldError`` for a name that is not a feature of a batch."""
    for name in names:
        if name not in FEATURE_NAMES:
            raise FieldError(field, f"names {name!r}, not a feature of a batch", f"use {', '.join(FEATURE_NAMES)}")


@dataclass(frozen=True)
class PrefillBeyond:
    """What each prefill token of a batch beyond ``tokens`` costs more.

    A batch's products take as long as reading the weights or as computing, whichever is longer, and attention grows
    with the prompt: no token of a larger batch costs less.  So a line that was fitted to small batches may bend up.
    """

    tokens: Annotated[int, Meta(ge=0, le=1_000_000_000), REQUIRED] = 0
    more_per_token_ns: Annotated[TimeNsPerToken, REQUIRED] = 0


@dataclass(frozen=True)
class Roofline:
    """Matrix products take as long as reading the weights or as computing, whichever is longer: what a line has not.

    ``knee_tokens``: tokens of a batch that take as long to compute as the weights take to read.  ``overlap``: 1 for
    products that take no longer than the longer of both, 0 for their sum, as a line has it.  Of reading r and
    computing c they take (r + c + sqrt((r - c)^2 + 4 (1 - overlap) r c)) / 2, and r + c less that is hidden.  A prefill
    saves what is hidden of all tokens beyond what is hidden of the decodes alone, whose cost the line has.
    ``experts`` are read as tokens touch them, E (1 - (1 - k / E)^tokens), each in ``per_expert_ns``.
    """

    knee_tokens: Annotated[float, Meta(ge=0, le=1e9)]
    overlap: Annotated[float, Meta(ge=0, le=1)]
    experts: Annotated[int, Meta(ge=0, le=100_000), IF_SET] = 0
    experts_per_token: Annotated[int, Meta(ge=0, le=1_000), IF_SET] = 0
    per_expert_ns: Annotated[TimeNs, IF_SET] = 0

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise FieldError("experts_per_token", "is more than there are experts", "correct one of them")

    def for_kernel(self, per_token_us: float) -> Floats:
        """float64, as ``kernel.step_time.roofline_us`` reads it, where computing a token takes so long."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        log_missed = math.log1p(-share) if share < 1 else -math.inf
        reading_us, experts_us = self.knee_tokens * per_token_us, self.experts * self.per_expert_ns / 1000
        return np.array([per_token_us, reading_us, 4 * (1 - self.overlap), experts_us, log_missed])

    def more_us(self, prefill_tokens: Floats, decode_tokens: Floats, per_token_us: float) -> Floats:
        """What steps take beside the line, where computing a token takes so long; below 0 without experts."""
        params = self.for_kernel(per_token_us)
        both, decodes = self._products(prefill_tokens + decode_tokens, params), self._products(decode_tokens, params)
        return np.asarray(both[0] - both[1] + decodes[1], np.float64)

    @staticmethod
    def _products(tokens: Floats, params: Floats) -> tuple[Floats, Floats]:
        """us: to read the experts that ``tokens`` tokens touch, and what is hidden."""
        per_token_us, reading_us, shown, experts_us, log_missed = params
        experts = experts_us * -np.expm1(log_missed * tokens) if experts_us else np.zeros(len(tokens))
        reading, computing = reading_us + experts, per_token_us * tokens
        longer = np.sqrt((reading - computing) ** 2 + shown * reading * computing)
        return experts, (reading + computing - longer) / 2


@dataclass(frozen=True)
class LatencyModel:
    """Step time of a batch, linear in what it holds, within a floor and a cap.

    ``min(cap_ns, max(floor_ns, intercept_ns + per_prefill_token_ns * prefill_tokens
    + per_decode_token_ns * decode_tokens + per_context_token_ns * context_tokens
    + per_1000_attended_ns * attended_tokens / 1000 + what ``prefill_beyond`` adds))``
    nanoseconds, then to whole microseconds: half up (``round_half_up``, the rule of the
    scheduler oracle) or towards zero (``truncate``, as BLIS does), at least 1 us.

    ``context_tokens``: KV tokens that the decodes attend to in a mean layer, including their own.
    ``attended_tokens``: KV tokens that the prefill tokens attend to there.  Kind ``blackbox`` has
    neither floor nor cap; kind ``floor`` is ``max(overhead, compute)``, with ``cap_ns`` (0:
    none) as StepML has it; kind ``roofline`` is the line with what ``roofline`` says.
    """

    kind: Literal["blackbox", "floor", "roofline"]
    intercept_ns: TimeNs
    per_prefill_token_ns: TimeNsPerToken
    per_decode_token_ns: TimeNsPerToken
    per_context_token_ns: TimeNsPerToken = 0
    per_1000_attended_ns: Annotated[TimeNs, IF_SET] = field(default=0, kw_only=True)
    floor_ns: TimeNs = 0
    rounding: Annotated[Literal["round_half_up", "truncate"], REQUIRED] = "round_half_up"
    cap_ns: Annotated[TimeNs, IF_SET] = 0
    prefill_beyond: Annotated[PrefillBeyond, IF_SET] = PrefillBeyond()
    roofline: Roofline | None = None

    def __post_init__(self) -> None:
        if (self.kind == "roofline") != (self.roofline is not None):
            raise FieldError("roofline", "goes with kind: roofline", "give both or neither")

    @staticmethod
    def completed(written: dict[str, Any]) -> dict[str, Any]:
        """The fields that a release may leave out: of a floor, which it must have, those of the line."""
        if written.get("kind") != "floor":
            return written
        if "floor" not in written:
            raise FieldError("floor", "is missing", "add a number with a unit, such as '12.5 us'")
        line = {"intercept": "0 us", "per_prefill_token": "0 us/token", "per_decode_token": "0 us/token"}
        return line | written

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them."""
        int_params = [
            self.intercept_ns,
            self.per_prefill_token_ns,
            self.per_decode_token_ns,
            self.per_context_token_ns,
            self.floor_ns,
            self.cap_ns,
            500 if self.rounding == "round_half_up" else 0,
            self.per_1000_attended_ns,
            *astuple(self.prefill_beyond),
        ]
        if self.roofline is not None:
            hidden = self.roofline.for_kernel(self.per_prefill_token_ns / 1000)
            return step_time.ROOFLINE, np.array(int_params, np.int64), hidden
        return step_time.LINEAR, np.array(int_params, np.int64), np.zeros(0)

    def smallest_positive_batch(self) -> int:
        """The least number of decodes, alone in a batch, whose step time is positive.

        1 for a sound model.  Raises ``ReleaseError`` without one.
        """
        if max(self.floor_ns, self.intercept_ns + self.per_decode_token_ns) > 0:
            return 1
        if self.per_decode_token_ns <= 0:
            raise ReleaseError("the step time of a decode batch is not positive at any size; fit the model again")
        return -self.intercept_ns // self.per_decode_token_ns + 1


class _Condition:
    """The condition of a regime as text: ``always``, or e.g. ``prefill_tokens < 256``."""

    def read(self, value: object, place: str) -> tuple[str, str, float] | None:
        match = re.fullmatch(r"(\w+) (==|<=|>=|<|>) (-?[0-9]+(?:\.[0-9]+)?)", str(value))
        if value != "always" and (not match or match[1] not in FEATURE_NAMES):
            raise FieldError(place, "is not a condition", "write `always` or e.g. `prefill_tokens < 256`")
        return (match[1], match[2], float(match[3])) if match else None

    def write(self, value: tuple[str, str, float] | None) -> str:
        return "always" if value is None else f"{value[0]} {value[1]} {value[2]:g}"

    def expected(self, info: types.Type) -> str:
        return "text"


_ConditionOrNone = Annotated[tuple[str, str, float] | None, Meta(extra={"codec": _Condition()})]


class _IsLogarithm:
    """What the line of a regime is: the step time, or the logarithm of one plus it."""

    def read(self, value: object, place: str) -> bool:
        if value not in ("us", "log1p us"):
            raise FieldError(place, f"is {shown(value)}", f"write {self.expected()}")
        return value == "log1p us"

    def write(self, value: bool) -> str:
        return "log1p us" if value else "us"

    def expected(self, info: types.Type | None = None) -> str:
        return "one of log1p us, us"


class _ByFeature:
    """Coefficients by the name of their feature."""

    def read(self, value: object, place: str) -> tuple[tuple[str, object], ...]:
        if not isinstance(value, dict):
            raise FieldError(place, f"is {shown(value)}", "write key: value pairs")
        refuse_unknown_features(place, [*value])
        return tuple(value.items())

    def write(self, value: tuple[tuple[str, float], ...]) -> dict[str, float]:
        return dict(value)

    def expected(self, info: types.Type) -> str:
        return "key: value pairs"


@dataclass(frozen=True)
class Regime:
    """A linear model over named features (us), used for batches that meet a condition.

    ``condition``: ``(feature, operator, value)`` with operator ``== < <= > >=``, or None for
    all.  ``coefficients``: by feature name (``FEATURE_NAMES``).  ``expm1``: the line is the
    logarithm of one plus the step time.
    """

    name: Text
    condition: Annotated[_ConditionOrNone, written_as("when"), REQUIRED] = field(default=None, kw_only=True)
    expm1: Annotated[bool, Meta(extra={"codec": _IsLogarithm()}), written_as("unit"), REQUIRED] = field(
        default=False, kw_only=True
    )
    intercept_us: Annotated[Number, written_as("intercept")]
    coefficients: Annotated[tuple[tuple[str, Number], ...], Meta(extra={"codec": _ByFeature()})] = ()


@dataclass(frozen=True)
class RegimeModel:
    """Step time piecewise by batch composition; the first regime whose condition holds is used.

    ``overhead_us`` > 0 keeps it within overhead and 3 times overhead; ``per_request_us`` is
    added for each request of the batch; the result is truncated (blis-semantics 3.7).  What ``prefill_beyond`` adds
    is added to the line of the regime.
    """

    overhead_us: Time = field(default=0.0, kw_only=True)
    per_request_us: Time = field(default=0.0, kw_only=True)
    prefill_beyond: Annotated[PrefillBeyond, IF_SET] = field(default=PrefillBeyond(), kw_only=True)
    regimes: Annotated[tuple[Regime, ...], REQUIRED] = ()

    def __post_init__(self) -> None:
        if not self.regimes or self.regimes[-1].condition is not None:
            raise FieldError("regimes", "do not cover every batch", "end with a regime that is used `always`")

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them."""
        if (lines := self._bent_lines()) is not None:
            return step_time.BENT, np.zeros(0, np.int64), lines
        float_params = [self.overhead_us, self.per_request_us, *self._beyond()]
        for regime in self.regimes:
            feature, operator, value = regime.condition or (None, "==", 0.0)
            by_name = dict(regime.coefficients)
            float_params += [
                -1.0 if feature is None else float(FEATURE_NAMES.index(feature)),
                float(_OPERATORS.index(operator)),
                value,
                float(regime.expm1),
                regime.intercept_us,
                *(by_name.get(name, 0.0) for name in FEATURE_NAMES),
            ]
        return step_time.REGIMES, np.zeros(0, np.int64), np.array(float_params + [0.0] * step_time.FEATURES)

    def _bent_lines(self) -> Floats | None:
        """float64, as the kernel reads lines that bend where decodes are many; None for other regimes."""
        rows: list[list[float]] = []
        for regime in self.regimes:
            feature, operator, most = regime.condition or ("decode_tokens", "<=", math.inf)
            slopes = dict(regime.coefficients)
            if (feature, operator) != ("decode_tokens", "<=") or regime.expm1 or not slopes.keys() <= {*_BENT_BY}:
                return None
            if math.isnan(most) or (rows and most < rows[-1][0]):
                return None
            rows.append([most, regime.intercept_us, *(slopes.get(name, 0.0) for name in _BENT_BY)])
        if self.overhead_us or self.per_request_us or not rows or rows[-1][0] != math.inf:
            return None
        return np.array([*chain.from_iterable(rows), *self._beyond()])

    def _beyond(self) -> tuple[float, float]:
        """From how many prefill tokens on each costs how many us more, as the kernel reads them."""
        return float(self.prefill_beyond.tokens), self.prefill_beyond.more_per_token_ns / 1000


@dataclass(frozen=True)
class ObservedCycles:
    """Teacher forcing: the step cycles that were observed, by the time of the run.

    A step that starts at t takes the cycle of the last anchor at or before t.  ``from_us``: int64, ascending;
    ``cycle_us``: int64 of the same length.  ``begins``: bool of the same length, whether a step began at that anchor;
    the next steps then began whole cycles later.  Such a step is the one with the nearest observed start, and ends with
    its cycle.  False where the server was idle behind it: a step nearer to the next anchor takes that one's cycle.
    None: unknown for all anchors.
    """

    from_us: Int64s
    cycle_us: Int64s
    begins: Bools | None = None

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them."""
        if len(self.from_us) == 0 or len(self.from_us) != len(self.cycle_us):
            raise ReleaseError("observed cycles need at least one anchor and a cycle for each; give step records")
        begins = np.zeros(len(self.from_us)) if self.begins is None else self.begins.astype(np.float64)
        return step_time.OBSERVED, np.concatenate([self.from_us, self.cycle_us]).astype(np.int64), begins


@dataclass(frozen=True)
class CorrectedModel:
    """Teacher forcing of a model: its step time, and what observed ones exceeded it by.

    Unlike ``ObservedCycles`` it still answers to what is in a batch.  ``line_ns``: what to add to each step, and
    per prefill, decode and context token (ns).  ``from_us``: int64, ascending; ``correction_us``: int64 of the same
    length, what to add further from each of these times of the run on.  All of either sign.  ``pace``: the model's
    step time is taken that many times, and ``varying``, times of the run (int64, ascending) and float64 of the same
    length, that many times more from each of them on.
    """

    model: Latency
    line_ns: tuple[int, int, int, int]
    from_us: Int64s
    correction_us: Int64s
    pace: float = 1.0
    varying: tuple[Int64s, Floats] = field(default_factory=lambda: (np.zeros(1, np.int64), np.ones(1)))

    @classmethod
    def of(cls, latency: Latency) -> CorrectedModel:
        """The model with nothing corrected; one that is corrected stays so."""
        nothing = np.zeros(1, np.int64)
        return latency if isinstance(latency, CorrectedModel) else cls(latency, (0, 0, 0, 0), nothing, nothing)

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them."""
        kind, int_params, float_params = self.model.for_kernel()
        at_us, times = self.varying
        paces = np.rint(step_time.PACE_UNIT * self.pace * times)
        head, own = np.array([len(paces), *self.line_ns]), np.array([len(int_params)])
        parts = [int_params, head, at_us, paces, self.from_us, self.correction_us, own]
        return step_time.CORRECTED + kind, np.concatenate(parts).astype(np.int64), float_params


@dataclass(frozen=True)
class FirstUse:
    """Kernels of a mixture of experts, which a new server compiles in the first step that needs them.

    vLLM lists for each model and GPU how its Triton kernel is laid out for some numbers of tokens, and takes the
    nearest one.  Triton compiles a kernel for each layout, and again where 16 divides the number of choices of an
    expert (tokens times ``experts_per_token``), or that less ``experts``, by which the sorted choices are padded.
    ``compile_us``: how long a step waits for one, and ``source`` where that is from.  Both of these are read off vLLM's
    fused_moe and Triton's rules of specialisation; the time is fitted.
    """

    compile_us: NonNegativeWholeTime
    experts: Annotated[int, Meta(ge=1, le=100_000)]
    experts_per_token: Annotated[int, Meta(ge=1, le=1_000)]
    source: Text | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise FieldError("experts_per_token", "is more than there are experts", "correct one of them")

    def on(self, latency: Latency, captured_tokens: int, max_num_batched_tokens: int) -> FirstUseModel:
        """A model with them, on a server that has compiled nothing but what its start needs.

        It captures CUDA graphs up to ``captured_tokens``, of sizes that 8 divides, and runs one batch of
        ``max_num_batched_tokens`` to measure its memory.
        """
        sizes = (*range(8, captured_tokens + 1, 8), max_num_batched_tokens)
        kernel_of = unwrap(step_time.kernel_of)  # as Python has it
        known = {kernel_of(size, self.experts_per_token, self.experts) for size in sizes}
        return FirstUseModel(latency, self, captured_tokens, sum(1 << kernel for kernel in known))


@dataclass(frozen=True)
class FirstUseModel:
    """A model whose steps also wait for kernels; ``known``: a bit for each that the server has when it starts."""

    model: Latency
    first_use: FirstUse
    captured_tokens: int
    known: int

    def for_kernel(self) -> KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them."""
        kind, int_params, float_params = self.model.for_kernel()
        first = self.first_use
        of = [first.compile_us, self.captured_tokens, first.experts_per_token, first.experts, self.known]
        parts = np.concatenate([int_params, np.array([*of, len(int_params)])])
        return step_time.FIRST_USE + kind, parts.astype(np.int64), float_params


@dataclass(frozen=True)
class BatchFeatures:
    """What a step-time function sees of a batch: token and request counts.

    ``context_tokens``: KV tokens that the decodes attend to in a mean layer, their own included.
    ``start_us``: when the batch can start; ``running`` and ``waiting``: depths after scheduling.
    """

    prefill_tokens: int
    prefill_requests: int
    decode_tokens: int
    context_tokens: int
    running: int
    waiting: int
    start_us: int


class StepTime(Protocol):
    """Any object that can say how long a batch takes, for studies in Python."""

    def step_time(self, batch: BatchFeatures) -> float:
        """Duration of the batch in us; truncated to whole us, at least 1."""


_BENT_BY = ("prefill_tokens", "decode_tokens", "kv_sum")
_OPERATORS = ("==", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Lifecycle:
    """Delays around the engine, us.  None of them blocks the server.

    Client send to waiting queue: ``pre_queue_us`` + ``pre_queue_per_prompt_token_us`` * prompt tokens (alpha0 and
    alpha1 of BLIS).  ``post_token_us``: added to every token on its way out (alpha2).  ``first_token_per_decode_us``: a
    first token waits this long per decode of its step, because the server hands out the tokens of new requests last.
    ``post_request_us``: added once at the end.  ``scheduling_us``, ``preemption_us``: BLIS reports them; no replay uses
    them.  ``stamp_us``: delay of the timestamp of the first token alone, by a client or a proxy; no release has it.
    ``..._source``: origin of the value.
    """

    pre_queue_us: Time = 0.0
    pre_queue_per_prompt_token_us: TimePerToken = 0.0
    post_token_us: Time = 0.0
    post_request_us: Time = 0.0
    scheduling_us: Time = 0.0
    preemption_us: Time = 0.0
    first_token_per_decode_us: Annotated[TimePerToken, IF_SET] = 0.0
    stamp_us: Annotated[float, UNWRITTEN] = 0.0
    pre_queue_source: Text | None = field(default=None, compare=False)
    pre_queue_per_prompt_token_source: Text | None = field(default=None, compare=False)
    post_token_source: Text | None = field(default=None, compare=False)
    first_token_per_decode_source: Text | None = field(default=None, compare=False)
    post_request_source: Text | None = field(default=None, compare=False)
    scheduling_source: Text | None = field(default=None, compare=False)
    preemption_source: Text | None = field(default=None, compare=False)
