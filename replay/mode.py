"""Replay modes: which part of a replay is observed and which is modelled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from blis_replay.base.errors import UnknownNameError
from blis_replay.blis.trace import EngineConfig

if TYPE_CHECKING:
    from blis_replay.blis.closed_loop import ClosedLoop

EngineValue = int | float | bool | str | None
# Argument and value, by the argument's name.
EngineOverrides = tuple[tuple[str, EngineValue], ...]

# The type of each argument's values.  What a release does goes by its version, and KV-cache groups are the model's.
_TYPES: dict[str, Any] = get_type_hints(EngineConfig, localns={"Speculation": object})
del _TYPES["speculation"], _TYPES["behaviours"], _TYPES["kv_cache_groups"], _TYPES["offloading"]
_TYPES |= {"speculative_config": str, "speculative_acceptance": str, "speculative_drafted_share": float}
_TYPES |= {"kv_offloading_size": float, "kv_offloading_costs": str}
_TYPES |= {"cudagraph_capture_sizes": str, "vllm_version": str}
ENGINE_ARGUMENTS = tuple(_TYPES)
_SWITCH = {"true": True, "false": False}
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_RUN = re.compile(r"([0-9]{1,5})(?:\.\.([0-9]{1,5})/([1-9][0-9]{0,4}))?", re.ASCII)


def parse_engine_value(name: str, text: str) -> EngineValue:
    """The value of an engine argument, written ``256``, ``true``, ``fcfs``, or ``none`` for unlimited KV memory.

    Raises ``UnknownNameError`` for an argument that the engine does not have, or a value of another
    kind; whether the engine can run with it is seen when it is made.
    """
    if name == "tensor_parallel_size":
        raise UnknownNameError(f"{name} is that of the coefficients; take those of another with --coefficients")
    if name not in _TYPES:
        close = get_close_matches(name, ENGINE_ARGUMENTS, 1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(ENGINE_ARGUMENTS)}"
        raise UnknownNameError(f"{name!r} is not an engine argument; {hint}")
    kind = _TYPES[name]
    or_none = NoneType in get_args(kind)
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise UnknownNameError(f"{name}={text} is not possible; use {name}=true|false")
        return _SWITCH[text.lower()]
    if name == "cudagraph_capture_sizes" and not captured_sizes(text):
        raise UnknownNameError(f"{name}={text} is not possible; give numbers of tokens such as '1 2 4 8..512/8'")
    if kind is str or get_origin(kind) is Literal:
        return text
    if text.lower() == "none" and or_none:
        return None
    if kind is float:
        if not _DECIMAL.fullmatch(text):
            raise UnknownNameError(f"{name}={text} is not possible; give a number such as 0.01")
        return float(text)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UnknownNameError(
            f"{name}={text} is not possible; give a whole number, 0 or more, of at most 18 digits"
            f"{', or none' if or_none else ''}"
        )
    return int(text)


def captured_sizes(text: object) -> tuple[int, ...] | None:
    """Sizes of captured CUDA graphs, ascending, written ``1 2 4 8..512/8``: each eighth up to 512; ``none``: no graphs.

    None if unknown: earlier releases stored only the first size, the last and their number.
    """
    words = str(text).strip("[]").replace(",", " ").split()
    if words == ["none"]:
        return ()
    runs = [_RUN.fullmatch(word) for word in words]
    sizes: set[int] = set()
    for run in runs:
        if run is None:
            return None
        first, last, gap = (int(number or run[1]) for number in run.groups())
        sizes |= set(range(first, last + 1, max(gap, 1)))
    return tuple(sorted(sizes - {0}))


def override_text(name: str, value: EngineValue) -> str:
    """``name=value`` as ``parse_engine_value`` reads it."""
    return f"{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"


# Requests generated from the load profile: as its load generator declares them, and as BLIS expands it.
_SHORTHANDS = {
    "spec": {"arrivals": "profile", "lengths": "profile", "prefix": "profile"},
    "blis-spec": {"arrivals": "blis-spec", "lengths": "blis-spec", "prefix": "blis-spec"},
}


@dataclass(frozen=True)
class ReplayMode:
    """A set of substitutions; the default substitutes nothing (``exact``).

    ``arrivals``: ``recorded``, or ``flat``: Poisson at the mean rate over the planned length of the run, whatever its
    stages (seed 42).  ``lengths``: the true decode lengths, or the ``re-tokenised`` counts.  ``prefix``: cached prompts
    as far as the recording tells, or ``none``.  Each of these three can be ``profile``: as the recording's load profile
    declares it, which may differ from what ran; or ``blis-spec``: as BLIS expands that profile.  With both, lengths
    include those of prompts.

    ``scheduling``: as the server ran, or forced.  ``pre_queue``, ``schedule``, ``step_time``, ``output_processing``:
    modelled, or as recorded.  ``pace``: that of the coefficients, or all step times by the one factor that the server's
    recorded steps show.  ``warm_up``: the kernels that a new server compiles, where the coefficients have them and
    the server was new; or the stalls that the recording shows; or none.  ``engine``: engine arguments in place of the
    recorded ones.

    ``rate``: factor on the arrival rate.  ``loop``: clients that wait for answers, in place of arrivals; none gives up.
    ``sessions``: ``prompts``: a prompt that goes on where an earlier request ended is the next turn of that client.
    """

    arrivals: Literal["recorded", "flat", "profile", "blis-spec"] = "recorded"
    lengths: Literal["true", "re-tokenised", "profile", "blis-spec"] = "true"
    prefix: Literal["recorded", "none", "profile", "blis-spec"] = "recorded"
    scheduling: Literal["recorded", "synchronous", "asynchronous"] = "recorded"
    pre_queue: Literal["modelled", "recorded"] = "modelled"
    schedule: Literal["modelled", "recorded"] = "modelled"
    step_time: Literal["modelled", "recorded"] = "modelled"
    pace: Literal["modelled", "recorded"] = "modelled"
    output_processing: Literal["modelled", "recorded"] = "modelled"
    warm_up: Literal["modelled", "recorded", "none"] = "modelled"
    engine: EngineOverrides = ()
    rate: float = 1.0
    loop: ClosedLoop | None = None
    sessions: Literal["none", "prompts"] = "none"

    @property
    def teacher_forced(self) -> bool:
        """Whether an observed quantity takes the place of a modelled one."""
        forced = (self.pre_queue, self.schedule, self.step_time, self.pace, self.output_processing, self.warm_up)
        return "recorded" in forced

    @property
    def name(self) -> str:
        """``exact``, or the substitutions as ``key=value``, joined by commas."""
        default = ReplayMode()
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("engine", "loop") and getattr(self, f.name) != getattr(default, f.name)
        ]
        loop = [] if self.loop is None else [f"{name}={value}" for name, value in vars(self.loop).items()]
        return ",".join([*changed, *loop, *(override_text(*override) for override in self.engine)]) or "exact"


# Each substitution and what it can be, as text.
ALLOWED: dict[str, tuple[str, ...]] = {
    name: tuple(map(str, get_args(kind)))
    for name, kind in get_type_hints(ReplayMode, localns={"ClosedLoop": object}).items()
    if name not in ("engine", "rate", "loop", "sessions")
}


def parse_mode(text: str) -> ReplayMode:
    """The mode that ``text`` names: ``exact``, ``spec``, ``blis-spec``, or ``key=value,...``.

    ``spec`` and ``blis-spec`` stand for arrivals, lengths and prefix of that kind.  Later items override earlier
    ones, so ``spec,lengths=true`` works.  Raises ``UnknownNameError`` for an unknown name, key or value.
    """
    settings: dict[str, str] = {}
    for item in (part.strip() for part in text.split(",")):
        if item == "exact":
            settings = {}
        elif item in _SHORTHANDS:
            settings |= _SHORTHANDS[item]
        elif "=" in item:
            key, value = item.split("=", 1)
            settings[key] = value
        else:
            raise UnknownNameError(
                f"{item!r} is not a replay mode; use exact, spec, blis-spec, or key=value with {_keys()}"
            )
    return _mode(settings)


def _mode(given: Mapping[str, str]) -> ReplayMode:
    engine = {key: value for key, value in given.items() if key in ENGINE_ARGUMENTS}
    settings = {key: value for key, value in given.items() if key not in engine}
    if "async_scheduling" in engine and settings.get("scheduling", "recorded") != "recorded":
        raise UnknownNameError("scheduling and async_scheduling are one thing; give one of them")
    for key, value in settings.items():
        if key not in ALLOWED:
            raise UnknownNameError(f"{key!r} cannot be substituted; use {_keys()}")
        if value not in ALLOWED[key]:
            raise UnknownNameError(f"{key}={value} is not possible; use {key}={'|'.join(ALLOWED[key])}")
    overrides = tuple(sorted((name, parse_engine_value(name, text)) for name, text in engine.items()))
    return ReplayMode(**settings, engine=overrides)  # type: ignore[arg-type]  # the loop above checked every value


def _keys() -> str:
    return f"{', '.join(ALLOWED)}, or an engine argument such as max_num_seqs"
