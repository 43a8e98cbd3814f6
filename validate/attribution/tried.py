"""What a simulator may be told wrong of its server: alternatives that are tried, one after the other.

Each alternative is another engine argument, another use of the prefix cache, other lengths.  One that explains every
request with the coefficients as they are wins.  Else all are given the same chance: step time and delays are fitted
anew beside each, so that an alternative wins only by what no step time and no delay can do, request by request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.compiled.arrays import Floats
from blis_replay.compiled.errors import ExperimentError
from blis_replay.ingest.readers.server.engine_defaults import shown_argument
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.engine import engine_config, replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.prefix import prefix_identity, prompt_tokens
from blis_replay.validate.attribution.fitted import EQUAL, EQUAL_SHARE, Fitted, Through, misfit

# An alternative must leave at most this share of what step time and delays alone leave, and so much less in all.
_LEAVES, _BETTER_BY = 0.6, 0.01
# One that alone leaves so many times what is off as told is none: a fit would have to hide nearly all that it does.
_FURTHEST = 2.0
# A rough fit that leaves so many times what may count is not made exact.
_FAR = 1.1
# Values of an argument beside which step time and delays are fitted: those that leave least without.
_MOST_VALUES = 3
# Numbers of KV blocks are tried on a ladder of at least so many, and then so many between two of its rungs.
_BLOCKS, _LADDER, _BETWEEN = "num_gpu_blocks", 4, 24


@dataclass(frozen=True)
class Alternative:
    """Another input of a replay.

    ``name``: of the component.  ``why``: half a sentence that explains the error.  ``mend``: what to do.
    ``decides``: the measurement that would tell it from others.  ``engine``, ``mode``: the changes.  ``warm``: whether
    the prefix cache had all prompts before.
    """

    name: str
    why: str
    mend: str
    decides: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    mode: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False

    def of(self, recording: Recording) -> Recording:
        """The recording with the engine arguments and the prefix cache of this alternative."""
        told = with_engine(recording, self.engine, "tried") if self.engine else recording
        return with_warm_cache(told) if self.warm else told


def with_warm_cache(recording: Recording) -> Recording:
    """The recording as if the server counted every whole block of every prompt as cached; else as it is.

    That is so after a load of the same prompts.  Nothing changes where hits were counted, or no prompt is known.
    """
    identity = prefix_identity(recording)
    if identity is None or not recording.requests["cached_prompt_tokens"].null_count():
        return recording
    keys, prompts = identity[0], prompt_tokens(recording)
    blocks = np.minimum(keys.count, np.maximum(prompts - 1, 0) // keys.block_size)
    cached = pl.Series("cached_prompt_tokens", blocks * keys.block_size, pl.Int64)
    return replace(recording, requests=rows_of(recording.requests.frame().with_columns(cached)))


@dataclass(frozen=True)
class Tried:
    """``best``: the alternative that explains what no step time and no delay does; ``equal``: those that do it as well.

    ``left``: the misfit that remains with it, ``before``: with the inputs as told, both relative to the latencies;
    ``beside_a_fit``: both with step time and delays fitted, else with the coefficients as they are.
    """

    best: Alternative
    equal: tuple[Alternative, ...]
    before: float
    left: float
    beside_a_fit: bool


def best_alternative(told: Through, *, may_be_warm: bool = False) -> Tried | None:
    """The alternative that explains best what the requests had otherwise than simulated; None if none is needed.

    ``told``: a replay with the inputs as told.  ``may_be_warm``: whether the prompts may have been served before, which
    only a real server remembers.  Raises what planning a replay of the recording raises.
    """
    recording, mode = told.recording, told.mode
    before = misfit(told.as_it_is)
    if before < _BETTER_BY:
        return None
    fitted, found = told.fit(), None
    others = _served_before(recording, mode) if may_be_warm else ()
    # Two engines are much like one with twice the room, so they are tried where nothing else explains it.
    for choice in ((*alternatives(recording, mode), *others), tuple(_ranks(recording))):
        tried = []
        for alternative in choice:
            through = _through(alternative, told, _FURTHEST * before)
            # What changes nothing needs no more than to be seen to change nothing.
            if through is not None and not np.array_equal(through.as_it_is, told.as_it_is, equal_nan=True):
                tried.append(_Trial(alternative, through))
        tried += _between(tried, told, before)
        found = _as_it_is(tried, before, fitted.left)
        if found is None and fitted.left >= _BETTER_BY:
            found = _beside_a_fit([t for t in tried if t.as_it_is <= _FURTHEST * before], fitted) or _without_a_fit(
                tried, before, fitted.left
            )
        if found is not None:
            break
    return found


@dataclass(frozen=True)
class _Trial:
    alternative: Alternative
    through: Through

    @property
    def as_it_is(self) -> float:
        """What is left with this alternative and nothing fitted."""
        return misfit(self.through.as_it_is)


_RANKS = "data_parallel_size"
# Arguments that change how requests are served, and no request: one plan is good for all of their values.
_OF_THE_ENGINE = {
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "num_gpu_blocks"),
    _RANKS,
}


def _through(alternative: Alternative, told: Through, most: float) -> Through | None:
    recording, mode = alternative.of(told.recording), replace(told.mode, **alternative.mode)
    try:
        if not alternative.mode and not alternative.warm and alternative.engine.keys() <= _OF_THE_ENGINE:
            return told.on(engine_config(replayed_engine(recording, mode), mode), most)
        return Through(recording, mode, told.entry, told.target)
    except ExperimentError:
        return None


def _between(tried: Sequence[_Trial], told: Through, before: float) -> list[_Trial]:
    """Numbers of KV blocks between the best of the ladder and those beside it: any number is as likely."""
    rungs = sorted((t for t in tried if _BLOCKS in t.alternative.engine), key=lambda t: t.alternative.engine[_BLOCKS])
    if len(rungs) < _LADDER:
        return []
    place = min(range(len(rungs)), key=lambda i: rungs[i].as_it_is)
    if rungs[place].as_it_is > before - _BETTER_BY:
        return []
    low, high = (int(rungs[i].alternative.engine[_BLOCKS]) for i in (max(place - 1, 0), min(place + 1, len(rungs) - 1)))
    said = told.recording.engine.get(_BLOCKS)
    values = range(low + 1, high, max((high - low) // _BETWEEN, 1))
    more = [_argument(_BLOCKS, value, None if said is None else said.value) for value in values]
    through = [(one, _through(one, told, _FURTHEST * before)) for one in more]
    return [_Trial(one, found) for one, found in through if found is not None]


def _as_it_is(tried: Sequence[_Trial], before: float, fitted: float) -> Tried | None:
    """The alternative that explains everything with the coefficients as they are; it needs no cost that is fitted.

    ``before``, ``fitted``: what the inputs as told leave, as they are and beside a fit.
    """
    best = min(tried, key=lambda one: one.as_it_is, default=None)
    if best is None or best.as_it_is > min(_BETTER_BY, _LEAVES * fitted, before - _BETTER_BY):
        return None
    return _best([(one.as_it_is, one) for one in tried], before, beside_a_fit=False)


def _without_a_fit(tried: Sequence[_Trial], before: float, fitted: float) -> Tried | None:
    """The alternative that leaves no more than step time and delays do that are fitted, with none of them changed.

    Of a real server much is left whatever is tried, so little is gained by a fit beside the right input.
    """
    best = min(tried, key=lambda one: one.as_it_is, default=None)
    if best is None or best.as_it_is > min(fitted, _LEAVES * before):
        return None
    return _best([(one.as_it_is, one) for one in tried], before, beside_a_fit=False)


def _beside_a_fit(tried: Sequence[_Trial], told: Fitted) -> Tried | None:
    """The alternative beside which step time and delays leave least, clearly less than beside the inputs as told."""
    promising: list[_Trial] = []
    for name in dict.fromkeys(one.alternative.name for one in tried):
        of_name = [one for one in tried if one.alternative.name == name]
        promising += sorted(of_name, key=lambda one: one.as_it_is)[:_MOST_VALUES]
    left = [(_left_beside(one, _LEAVES * told.left), one) for one in promising]
    least = min((value for value, _ in left), default=told.left)
    if least > _LEAVES * told.left or told.left - least < _BETTER_BY:
        return None
    return _best(left, told.left, beside_a_fit=True)


def _left_beside(one: _Trial, most: float) -> float:
    """What a fit beside an alternative leaves; roughly where that is far too much, and no other fit would do."""
    roughly = one.through.fit(most, roughly=True).left
    if roughly <= _FAR * (EQUAL_SHARE * most + EQUAL):
        return one.through.fit(most).left
    one.through.forget()
    return roughly


def _best(left: Sequence[tuple[float, _Trial]], before: float, *, beside_a_fit: bool) -> Tried:
    least = min(value for value, _ in left)
    equal = sorted((pair for pair in left if pair[0] <= EQUAL_SHARE * least + EQUAL), key=lambda pair: pair[0])
    if len({one.alternative.name for _, one in equal}) > 1 and equal[0][1].through.has_first_tokens:
        equal = _of_like_depths(equal)
    best = equal[0][1].alternative
    others = {one.alternative.name: one.alternative for _, one in equal if one.alternative.name != best.name}
    return Tried(best, tuple(others.values()), before, equal[0][0], beside_a_fit)


# Depths that differ by so much more than those of the best, as a share of the time, are others.
_OTHER_DEPTHS, _LEAST_DIFFERENCE = 2.0, 0.1


def _of_like_depths(equal: list[tuple[float, _Trial]]) -> list[tuple[float, _Trial]]:
    """Those whose numbers of requests in decode, while others wait, are as observed.

    A bound of requests is met all the time; one of memory lets in as many as their lengths allow.
    """
    apart = [_depths_apart(one.through) for _, one in equal]
    least = min(difference for difference, _ in apart)
    within = [max(_OTHER_DEPTHS * least, least + max(_LEAST_DIFFERENCE, chance)) for _, chance in apart]
    return [pair for pair, (difference, _), most in zip(equal, apart, within, strict=True) if difference <= most]


def _depths_apart(through: Through) -> tuple[float, float]:
    """By which share of the time depths differ, and how much of that may be chance.

    A share of time in which ``n`` requests come and go one after the other is uncertain by half of ``1 / sqrt(n)``.
    """
    observed, simulated = through.streams_us()
    usual_us = float(np.quantile(observed[1] - observed[0], _AT_ONCE))
    shares, waited_us = depths(observed, usual_us)
    others, _ = depths(simulated, usual_us)
    after_another = waited_us / max(float((observed[2] - observed[1]).mean()), 1.0)
    longest = max(len(shares), len(others))
    apart = np.pad(shares, (0, longest - len(shares))) - np.pad(others, (0, longest - len(others)))
    return float(np.abs(apart).sum()) / 2, 0.5 / float(np.sqrt(max(after_another, 1.0)))


# This share of requests has the first token without a wait, or after a short one.
_AT_ONCE = 0.25


def depths(streams_us: Floats, usual_us: float) -> tuple[Floats, float]:
    """float64[depths]: shares of the time in which so many requests decode while one waits; and that time, us.

    One waits that is without a first token for longer than ``usual_us``.
    """
    sent_us, first_us, end_us = streams_us
    waits = first_us > sent_us + usual_us
    from_us, until_us = sent_us[waits] + usual_us, first_us[waits]
    at_us = np.unique(np.concatenate([first_us, end_us, from_us]))
    decoding, waiting = (
        np.searchsorted(np.sort(begin), at_us, "right") - np.searchsorted(np.sort(end), at_us, "right")
        for begin, end in ((first_us, end_us), (from_us, until_us))
    )
    lasts_us = np.where(waiting > 0, np.diff(at_us, append=at_us[-1:]), 0.0)
    waited_us = float(lasts_us.sum())
    return np.bincount(decoding, lasts_us) / max(waited_us, 1.0), waited_us


def alternatives(recording: Recording, mode: ReplayMode) -> Iterator[Alternative]:
    """All that is tried for a recording, replayed in a mode."""
    told = {name: setting.value for name, setting in recording.engine.items()}
    yield from _switches(told, mode)
    for name, values in _values(recording, told).items():
        for value in values:
            if value != told.get(name):
                yield _argument(name, value, told.get(name))
    lengths = recording.requests["output_tokens_reported"]
    if (
        mode.lengths == "true"
        and not lengths.null_count()
        and not (lengths == recording.requests["output_tokens"]).all()
    ):
        yield Alternative(
            "output lengths",
            "its requests do not decode as many tokens as the server did",
            "record server usage (stream_options include_usage)",
            "server usage of each request",
            mode={"lengths": "re-tokenised"},
        )


def _served_before(recording: Recording, mode: ReplayMode) -> Iterator[Alternative]:
    """A prefix cache that was warm when the recording began, of a server that has one."""
    caching = recording.engine.get("enable_prefix_caching")
    if mode.prefix == "recorded" and (caching is None or caching.value):
        yield Alternative(
            "prefix cache",
            "it computes prompts at first that the server had in its prefix cache from a load before the recording",
            "restart the server before a recording, or have it count cached tokens",
            "cached tokens in the server's usage",
            warm=True,
        )


def _ranks(recording: Recording) -> Iterator[Alternative]:
    """Other numbers of engines behind one address."""
    setting = recording.engine.get(_RANKS)
    told = setting.value if setting else 1
    yield from (_argument(_RANKS, ranks, told) for ranks in (1, 2, 4) if ranks != told)


def _switches(told: Mapping[str, Any], mode: ReplayMode) -> Iterator[Alternative]:
    running = bool(told.get("async_scheduling", True))
    if mode.scheduling == "recorded":
        other = "synchronous" if running else "asynchronous"
        why = f"it schedules {'asynchronously' if running else 'synchronously'}, and the server {other}ly"
        mend = f"tell it: async_scheduling: {str(not running).lower()} in a file for blis-replay ingest --engine"
        decides = "journeys (from scheduled to first token), or the server's start-up log"
        yield Alternative("scheduling mode", why, mend, decides, engine={"async_scheduling": not running})
    if mode.prefix == "recorded":
        caching = bool(told.get("enable_prefix_caching", True))
        had = "it finds prompts in a prefix cache, and the server computed them whole"
        lacked = "it computes prompts whole that the server had in its prefix cache"
        mend = f"tell it: enable_prefix_caching: {str(not caching).lower()} in a file for blis-replay ingest --engine"
        decides = "prompt tokens computed (step records), or cached tokens in the server's usage"
        changed = {"enable_prefix_caching": not caching}
        yield Alternative("prefix cache", had if caching else lacked, mend, decides, engine=changed)
    if told.get("enable_chunked_prefill", True):
        yield _argument("enable_chunked_prefill", False, True)


_DECIDES = {
    "max_num_seqs": "running and waiting depth (step records or /metrics)",
    "max_num_batched_tokens": "tokens a step (step records)",
    "long_prefill_token_threshold": "tokens a step (step records)",
    "num_gpu_blocks": "KV blocks in all (step records, or the server's start-up log)",
    "enable_chunked_prefill": "the server's start-up log",
    _RANKS: "the server's start-up log, or running depth of each engine (/metrics)",
}


def _argument(name: str, value: int | bool, told: object) -> Alternative:
    shown, has = shown_argument(value), "no bound" if told is None else shown_argument(told)
    label = "KV blocks" if name == "num_gpu_blocks" else name
    why = f"it has {label} {has}, and the server {'about ' if label == 'KV blocks' else ''}{shown}"
    mend = f"look it up and tell it: {name}: {str(value).lower()} in a file for blis-replay ingest --engine"
    return Alternative(label, why, mend, _DECIDES[name], engine={name: value})


def _values(recording: Recording, told: Mapping[str, Any]) -> dict[str, list[int]]:
    """What is tried of each argument: what was seen in the steps, else values on a ladder."""
    requests, steps = recording.requests, recording.steps
    needed = int((requests["prompt_tokens"].fill_null(0) + requests["output_tokens"].fill_null(0)).max() or 1)  # type: ignore[arg-type]
    seqs = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024]
    batched = [128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384]
    thresholds = [0, 64, 128, 256, 512, 1024, 2048]
    block = int(told.get("block_size", 16))
    least = -(-needed // block) + 2
    blocks = sorted({round(least * 1.15**i) for i in range(28)})
    if not steps.is_empty():
        seen = steps.aggregate(
            depth="max(running_depth)", tokens="max(prefill_tokens + decode_tokens)", blocks="max(kv_blocks_total)"
        )
        seqs = [int(seen["depth"])] if seen["depth"] else seqs
        batched = [value for value in batched if not seen["tokens"] or value >= 0.9 * int(seen["tokens"])]
        blocks = [int(seen["blocks"]) + 1] if seen["blocks"] else blocks
    budget = int(told.get("max_num_batched_tokens", 2048))
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": batched,
        "long_prefill_token_threshold": [value for value in thresholds if value < budget],
        "num_gpu_blocks": blocks,
    }
