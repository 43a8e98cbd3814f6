"""Step time from measured operator times: tables by tokens and context, and few coefficients on top."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec import inspect as types

from blis_replay.base.arrays import Floats
from blis_replay.base.document import (
    REQUIRED,
    UNWRITTEN,
    FieldError,
    NonNegativeTime,
    Text,
    shown,
    written_as,
)
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.kernel import step_time
from blis_replay.blis.kernel.state import LONGEST_STEP_US
from blis_replay_labs.silicon import operators_kernel as kernel


class _Line:
    """Non-negative numbers of a table, written as one line of YAML with blanks between them."""

    _pattern = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?( [0-9]{1,12}(\.[0-9]{1,6})?)*")

    def read(self, value: object, place: str) -> tuple[float, ...]:
        if not isinstance(value, str) or not self._pattern.fullmatch(value):
            raise FieldError(place, f"is {shown(value)}", "write numbers with blanks between them")
        return tuple(map(float, value.split(" ")))

    def write(self, value: tuple[float, ...]) -> str:
        return " ".join(f"{number:.1f}".removesuffix(".0") for number in value)

    def expected(self, info: types.Type) -> str:
        return "numbers with blanks between them"


Numbers = Annotated[tuple[float, ...], Meta(extra={"codec": _Line()})]
Multiple = Annotated[float, Meta(ge=0, le=1e6)]

# No recorded server has more tokens in a step; longer tables are cut here and extended proportionally.
_MOST_TOKENS = 8_192


def _refuse_uneven(name: str, knots: Numbers, values: str, found: int) -> None:
    if len(knots) < 2 or knots[0] <= 0 or any(low >= high for low, high in pairwise(knots)):
        raise FieldError(name, "is not two numbers above 0 or more, each above the one before", "correct it")
    if found != len(knots):
        raise FieldError(values, f"has {found} for {len(knots)} {name}", "give one for each")


@dataclass(frozen=True)
class TokenTimes:
    """Time of a batch of ``tokens`` (ascending) without attention, us.

    ``mixed_us``: with prefill; ``decode_us``: without; ``all_reduce_us``: the part of either for traffic between GPUs.
    """

    tokens: Numbers
    mixed_us: Numbers
    decode_us: Numbers
    all_reduce_us: Numbers

    def __post_init__(self) -> None:
        for name in ("mixed_us", "decode_us", "all_reduce_us"):
            _refuse_uneven("tokens", self.tokens, name, len(getattr(self, name)))


@dataclass(frozen=True)
class PrefillAttention:
    """Attention time of prefill, us: rows by prefill tokens, columns by mean tokens that each attends to."""

    tokens: Numbers
    attended_tokens: Numbers
    us: tuple[Numbers, ...]

    def __post_init__(self) -> None:
        _refuse_uneven("tokens", self.tokens, "us", len(self.us))
        for row in self.us:
            _refuse_uneven("attended_tokens", self.attended_tokens, "us", len(row))


@dataclass(frozen=True)
class DecodeAttention:
    """Attention time of decodes, us: rows by requests, columns by mean context."""

    requests: Numbers
    context_tokens: Numbers
    us: tuple[Numbers, ...]

    def __post_init__(self) -> None:
        _refuse_uneven("requests", self.requests, "us", len(self.us))
        for row in self.us:
            _refuse_uneven("context_tokens", self.context_tokens, "us", len(row))


class OperatorCoefficients(Struct, frozen=True, rename=lambda name: name.removesuffix("_us")):
    """Non-negative coefficients on the tables.

    Factors of the tables: ``products`` (all but attention and all-reduces), ``attention``, ``all_reduce``.  In us:
    ``per_step_us``, ``per_request_us`` (per request in the batch).
    """

    products: Multiple = 1.0
    attention: Multiple = 1.0
    all_reduce: Multiple = 1.0
    per_step_us: NonNegativeTime = 0.0
    per_request_us: NonNegativeTime = 0.0


AS_MEASURED = OperatorCoefficients()


@dataclass(frozen=True)
class OperatorModel:
    """Step time of one model on its GPUs: scaled operator times plus the time of the host.

    ``source``: who measured the tables.
    ``captured_sizes``: ascending batch sizes for which the server captured CUDA graphs.  A smaller batch is padded to
    the next size.  Empty: batches are not padded.
    """

    coefficients: Annotated[OperatorCoefficients, REQUIRED] = field(default=AS_MEASURED, kw_only=True)
    source: Annotated[Text, REQUIRED] = field(default="not stated", kw_only=True)
    products: TokenTimes
    prefill: Annotated[PrefillAttention, written_as("prefill_attention")]
    decode: Annotated[DecodeAttention, written_as("decode_attention")]
    captured_sizes: Annotated[tuple[int, ...], UNWRITTEN] = ()

    def with_captured(self, sizes: tuple[int, ...]) -> OperatorModel:
        """The model on a server that captured CUDA graphs of these sizes."""
        return replace(self, captured_sizes=tuple(sorted(size for size in set(sizes) if size > 0)))

    def for_kernel(self) -> step_time.KernelModel:
        """Kind, integer and float parameters as ``operators_kernel`` reads them.

        Raises ``ReleaseError`` if a step of the tables takes more than an hour.
        """
        c, products, prefill, decode = self.coefficients, self.products, self.prefill, self.decode
        tokens = self._computed_tokens(min(int(products.tokens[-1]), _MOST_TOKENS))
        reduced = np.interp(tokens, products.tokens, products.all_reduce_us)
        by_tokens = [np.interp(tokens, products.tokens, us) for us in (products.mixed_us, products.decode_us)]
        curves: list[Floats] = [np.maximum(c.products * (us - reduced), 0) + c.all_reduce * reduced for us in by_tokens]
        for knots, columns, us in (
            (prefill.tokens, prefill.attended_tokens, prefill.us),
            (decode.requests, decode.context_tokens, decode.us),
        ):
            curves += [np.array(knots), np.array(columns), c.attention * np.array(us).ravel()]
        head = np.zeros(kernel.HEAD)
        head[kernel.STEP_US], head[kernel.REQUEST_US] = c.per_step_us, c.per_request_us
        float_params = np.concatenate([head, *curves])
        if not np.isfinite(float_params).all() or float_params.max() > LONGEST_STEP_US:
            raise ReleaseError("a step takes more than an hour; check the operator times and coefficients")
        knots_of = (prefill.tokens, prefill.attended_tokens, decode.requests, decode.context_tokens)
        int_params = np.array([len(tokens), *map(len, knots_of)], np.int64)
        return step_time.registered(kernel.step_us, int_params, float_params)

    def _computed_tokens(self, most: int) -> Floats:
        """float64[most + 1]: tokens computed, padding included, for batches of 0, 1, ... tokens."""
        tokens = np.arange(most + 1, dtype=np.float64)
        sizes = np.array([size for size in self.captured_sizes if size <= most], np.float64)
        if len(sizes):
            captured = tokens <= sizes[-1]
            tokens[captured] = sizes[np.searchsorted(sizes, tokens[captured])]
        return tokens


def batch_times_us(
    model: OperatorModel,
    prefill: Floats,
    decode: Floats,
    context: Floats,
    mixed_share: Floats | None = None,
    prompt_tokens: float = 0.0,
) -> Floats:
    """float64[rows, 5]: cost of mean batches per coefficient at 1, for fitting.

    ``prefill`` and ``decode``: tokens of a mean step; ``context``: tokens of a mean decode; fractions are allowed.
    ``mixed_share``: share of steps with prefill; ``prefill`` is spread over these, because no operator time is
    proportional to tokens.  Prompts have ``prompt_tokens``.  Without it all steps have the mean tokens.
    """
    shares = np.zeros(len(decode)) if mixed_share is None else mixed_share
    size = np.divide(prefill, shares, out=np.zeros(len(decode)), where=shares > 0)
    alone = decode + np.where(shares > 0, 0, prefill)
    times = np.zeros((len(decode), 5))
    for share, tokens, of in (
        (1 - shares, alone, model.products.decode_us),
        (shares, decode + size, model.products.mixed_us),
    ):
        reduced = np.interp(tokens, model.products.tokens, model.products.all_reduce_us)
        times[:, 0] += share * (np.interp(tokens, model.products.tokens, of) - reduced)
        times[:, 2] += share * reduced
    times[:, 1] = _looked_up(decode, context, model.decode.requests, model.decode.context_tokens, model.decode.us)
    seen = np.maximum(prompt_tokens - size / 2, size / 2)
    prefills = _looked_up(size, seen, model.prefill.tokens, model.prefill.attended_tokens, model.prefill.us)
    times[:, 1] += shares * prefills
    times[:, 3], times[:, 4] = 1, decode
    return times


def _looked_up(at: Floats, column: Floats, knots: Numbers, columns: Numbers, us: tuple[Numbers, ...]) -> Floats:
    """float64[n]: a table with rows at ``knots``, interpolated linearly."""
    rows = np.array([np.interp(column, columns, row) for row in us])
    return np.array([np.interp(x, knots, values) for x, values in zip(at, rows.T, strict=True)], np.float64)
