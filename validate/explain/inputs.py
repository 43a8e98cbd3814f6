"""Hypotheses on the inputs of a replay: requests, prefix cache and engine arguments that the server did not have.

``contradicted``: those that a record of the server proves wrong.  ``to_try``: open ones, each another input whose error
is measured.  A further engine argument is an entry of ``ARGUMENTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blis_replay.base.engine_packs import shown_argument
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.steps.records import detected_async
from blis_replay.replay.engine import engine_values
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.explain.hypothesis import Hypothesis

BLOCKS, RANKS = "num_gpu_blocks", "data_parallel_size"
_ASYNC, _CACHING = "async_scheduling", "enable_prefix_caching"
_PREFIX, _SCHEDULING, LENGTHS = "prefix cache", "scheduling mode", "output lengths"
_OTHER_LENGTHS = "the simulator's requests do not decode as many tokens as the server did"

# Values to try where nothing was counted: powers of two and values between, as people set them.
_SEQS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_BUDGETS = (128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_THRESHOLDS = (0, 64, 128, 256, 512, 1024, 2048)
_RANK_COUNTS = (1, 2, 4)
BLOCK_SIZES = (16, 32, 64, 128)
BLOCK_RATIO, BLOCK_RUNGS = 1.15, 28  # a ladder from the blocks of the longest request to 44 times as many
MIN_OF_BUDGET = 0.9  # a budget below this share of the fullest step is not tried
DEFAULT_BUDGET = 2048  # max_num_batched_tokens that vLLM takes for a server

# A limit of the server is reached often, a maximum of the load once.
MIN_FULL_STEPS = 10  # steps with exactly the most tokens ...
MIN_MIXES = 4  # ... with this many different numbers of decodes among them
MIN_WAITING_STEPS = 50  # steps in which requests wait ...
MAX_BELOW_LIMIT = 0.02  # ... at most this share of them with fewer running
MIN_FREE_BLOCKS = 0.1  # while at least this share of the KV blocks is free

OR_MORE = " or more"  # of a limit that was never reached

Stated = Mapping[str, Any]


@dataclass(frozen=True)
class Argument:
    """An engine argument that may be stated wrongly.

    ``decides``: the measurement that shows it.  ``values``: those to try, by the number that step records show (None
    without), the recording and its stated arguments; ``between``: any value between two of them is as likely.
    ``label``: of the component.  ``whys``: of a switch, why it is wrong, by the server's value.  ``seen``: SQL for the
    number that steps show; ``counts``: that in words, where a larger one proves the stated argument wrong.
    ``default``: if nothing is stated; None: no bound.  ``mode``: the field of the replay mode that overrides this
    argument; it is tried only where that is ``recorded``.  ``last``: tried only where nothing else explains.
    ``scheduled``: equal schedules prove it right.
    """

    name: str
    decides: str
    values: Callable[[int | None, Recording, Stated], tuple[int | bool, ...]] = lambda *_: (False, True)
    between: bool = False
    label: str = ""
    whys: Mapping[bool, str] = field(default_factory=dict)
    seen: str = ""
    counts: str = ""
    default: object = None
    mode: str = ""
    last: bool = False
    scheduled: bool = True

    @property
    def title(self) -> str:
        """The name of its component."""
        return self.label or self.name

    def hypothesis(self, value: int | bool | str, stated: object, *, at_least: bool = False) -> Hypothesis:
        """The server had this value in place of the stated one; ``at_least``: or any larger one."""
        label, about = self.title, "about " if self.name == BLOCKS else ""
        has = "no bound" if stated is None else shown_argument(stated)
        why = (
            self.whys.get(bool(value))
            or f"the simulator has {label} {has}, and the server {about}{shown_argument(value)}{OR_MORE * at_least}"
        )
        remedy = f"{'' if self.whys else 'look it up and '}{stated_as(self.name, value, at_least=at_least)}"
        return Hypothesis(label, why, remedy, decides=self.decides, engine={self.name: value})


def stated_as(name: str, value: int | bool | str, *, at_least: bool = False) -> str:
    """The remedy for a wrong engine argument."""
    return f"state {name}: {str(value).lower()}{OR_MORE * at_least} in a file for blis-replay ingest --engine"


def _block_ladder(seen: int | None, recording: Recording, stated: Stated) -> tuple[int, ...]:
    if seen:
        return (seen + 1,)  # the null block is not counted
    requests = recording.requests
    lengths = requests["prompt_tokens"].fill_null(0) + requests["output_tokens"].fill_null(0)
    longest = int(lengths.max() or 1)  # type: ignore[arg-type]  # a column of integers
    least = -(-longest // int(stated.get("block_size", 16))) + 2
    return tuple(sorted({round(least * BLOCK_RATIO**i) for i in range(BLOCK_RUNGS)}))


ARGUMENTS = (
    Argument(
        _ASYNC,
        "journeys (from scheduled to first token), or the server's start-up log",
        label=_SCHEDULING,
        whys={
            False: "the simulator schedules asynchronously, and the server synchronously",
            True: "the simulator schedules synchronously, and the server asynchronously",
        },
        default=True,
        mode="scheduling",
    ),
    Argument(
        _CACHING,
        "prompt tokens computed (step records), or cached tokens in the server's usage",
        label=_PREFIX,
        whys={
            False: "the simulator finds prompts in a prefix cache, and the server computed them whole",
            True: "the simulator computes prompts whole that the server had in its prefix cache",
        },
        default=True,
        mode="prefix",
        scheduled=False,
    ),
    Argument("enable_chunked_prefill", "the server's start-up log", lambda *_: (False,), default=True),
    Argument(
        "max_num_seqs",
        "running and waiting depth (step records or /metrics)",
        lambda seen, _recording, _stated: (seen,) if seen else _SEQS,
        between=True,
        seen="max(running_depth)",
        counts="requests run at once",
    ),
    Argument(
        "max_num_batched_tokens",
        "tokens a step (step records)",
        lambda seen, _recording, _stated: tuple(one for one in _BUDGETS if not seen or one >= MIN_OF_BUDGET * seen),
        between=True,
        seen="max(prefill_tokens + decode_tokens)",
        counts="tokens in a step",
    ),
    Argument(
        "long_prefill_token_threshold",
        "tokens a step (step records)",
        lambda _seen, _recording, stated: tuple(
            one for one in _THRESHOLDS if one < int(stated.get("max_num_batched_tokens", DEFAULT_BUDGET))
        ),
        between=True,
    ),
    Argument(
        BLOCKS,
        "KV blocks in all (step records, or the server's start-up log)",
        _block_ladder,
        between=True,
        label="KV blocks",
        seen="max(kv_blocks_total)",
    ),
    Argument(
        "block_size",
        "the server's start-up log",
        lambda _seen, _recording, stated: BLOCK_SIZES if stated.get(_CACHING, True) else (),
        default=16,
        last=True,
    ),
    Argument(
        RANKS,
        "the server's start-up log, or running depth of each engine (/metrics)",
        lambda *_: _RANK_COUNTS,
        default=1,
        last=True,
    ),
)


def argument_hypothesis(name: str, value: int | bool | str, stated: object, *, at_least: bool = False) -> Hypothesis:
    """The server had this value of an engine argument, one of ``ARGUMENTS`` or another; ``at_least``: or more."""
    argument = next((one for one in ARGUMENTS if one.name == name), Argument(name, ""))
    return argument.hypothesis(value, stated, at_least=at_least)


WARM_CACHE = Hypothesis(
    _PREFIX,
    "the simulator computes prompts at first that the server had in its prefix cache from a load before the recording",
    "restart the server before a recording, or have it count cached tokens",
    decides="cached tokens in the server's usage",
    warm=True,
)
REPORTED_LENGTHS = Hypothesis(
    LENGTHS,
    _OTHER_LENGTHS,
    "record server usage (stream_options include_usage)",
    decides="server usage of each request",
    mode={"lengths": "re-tokenised"},
)


def _seen(steps: Rows) -> dict[str, int]:
    """What step records show of the arguments that they show."""
    found = steps.aggregate(**{argument.name: argument.seen for argument in ARGUMENTS if argument.seen})
    return {name: int(value) for name, value in found.items() if value is not None}


def to_try(recording: Recording, mode: ReplayMode, *, may_be_warm: bool = False) -> tuple[list[Hypothesis], ...]:
    """Open hypotheses on a recording replayed in a mode; later lists are tried only where earlier ones fail.

    ``may_be_warm``: whether prompts may have been served before the recording, which only a real server remembers.
    """
    stated, seen = engine_values(recording), _seen(recording.steps)
    cached = recording.requests["cached_prompt_tokens"]
    hits_known = not cached.null_count() and bool(cached.sum())
    # With these an offload of KV blocks, which the server had, would not be simulated.
    kept = {RANKS, _CACHING, "block_size"} if stated.get("kv_offloading_size") else set()
    kept |= {_CACHING} if hits_known else set()
    groups: tuple[list[Hypothesis], list[Hypothesis]] = ([], [])
    for argument in ARGUMENTS:
        if argument.name in kept or (argument.mode and getattr(mode, argument.mode) != "recorded"):
            continue
        value = stated.get(argument.name, argument.default)
        values = argument.values(seen.get(argument.name), recording, stated)
        groups[argument.last].extend(argument.hypothesis(other, value) for other in values if other != value)
    lengths = recording.requests["output_tokens_reported"]
    reported = not lengths.null_count() and not (lengths == recording.requests["output_tokens"]).all()
    if mode.lengths == "true" and reported:
        groups[0].append(REPORTED_LENGTHS)
    if mode.prefix == "recorded" and stated.get(_CACHING, True) and may_be_warm and not hits_known:
        groups[0].append(WARM_CACHE)
    return groups


def contradicted(recording: Recording, mode: ReplayMode) -> list[Hypothesis]:
    """Inputs of a replay that are proved wrong: by its mode, or by what the server counted."""
    as_recorded = (
        ("arrivals", "the simulator's requests do not come when they were sent", "the recorded arrivals", "arrivals"),
        (LENGTHS, _OTHER_LENGTHS, "the true decode lengths", "lengths"),
        (
            _PREFIX,
            "the simulator prefills prompts that the server had in its prefix cache",
            "prompts cached as far as the recording tells",
            "prefix",
        ),
    )
    exact = ReplayMode()
    found = [_as_recorded(*one) for one in as_recorded if getattr(mode, one[-1]) != getattr(exact, one[-1])]
    if mode.engine:
        arguments = ", ".join(f"{name}={value}" for name, value in mode.engine)
        why = f"the simulator runs with {arguments}, which the server did not"
        remedy = f"replay it as recorded, without {arguments}"
        change = {"engine": ()}
        found.append(Hypothesis("engine arguments", why, remedy, "the recorded arguments", recorded=True, mode=change))
    found += _counted(recording, mode)
    asynchronous = bool(recording.engine[_ASYNC].value)
    if mode.scheduling != "recorded" and (mode.scheduling == "asynchronous") != asynchronous:
        basis = f"{'asynchronous' if asynchronous else 'synchronous'} scheduling, as recorded"
        found.append(
            _as_recorded(_SCHEDULING, argument_hypothesis(_ASYNC, asynchronous, None).why, basis, "scheduling")
        )
    return found


def _as_recorded(name: str, why: str, basis: str, key: str) -> Hypothesis:
    value = getattr(ReplayMode(), key)
    return Hypothesis(
        name, why, f"replay it as recorded: --replay {key}={value}", basis, recorded=True, mode={key: value}
    )


def _counted(recording: Recording, mode: ReplayMode) -> Iterator[Hypothesis]:
    """Engine arguments that the server's own records contradict."""
    stated, seen = engine_values(recording), _seen(recording.steps)
    for argument in ARGUMENTS:
        name, value = argument.name, stated.get(argument.name)
        if not argument.counts or name not in seen or value is None or seen[name] == int(value):
            continue
        most, bound = seen[name], ""
        if most < int(value) and not (bound := _bound(recording.steps, name, most)):
            continue
        server = f"{most:,}: {bound}" if bound else f"had {most:,} {argument.counts}"
        basis = f"the {'bound of' if bound else 'most'} {argument.counts} that step records count"
        why = f"the simulator has {name} {int(value):,}, and the server {server}"
        yield _proved(name, most, basis, why, at_least=not bound)
    value, blocks = stated.get(BLOCKS), seen.get(BLOCKS, -1) + 1  # the null block is not counted
    if blocks not in (0, value):
        has = "unlimited KV memory" if value is None else f"{int(value):,} KV blocks"
        why = f"the simulator has {has} and the server had {blocks:,} blocks"
        yield _proved(BLOCKS, blocks, "the blocks that step records count", why)
    if mode.prefix == "recorded" and not stated.get(_CACHING, True):
        counted = (
            rows["cached_prompt_tokens"].fill_null(0).sum() for rows in (recording.requests, recording.lifecycles)
        )
        if hits := int(max(counted)):
            why = f"the simulator computes prompts whole, of which the server had {hits:,} tokens in its prefix cache"
            yield _proved(_CACHING, True, "a prefix cache, as the server counts hits", why)
    running = None
    if mode.scheduling == "recorded" and not recording.steps.is_empty():
        running = detected_async(recording.steps, recording.journey_events)
    if running is not None and stated.get(_ASYNC, running) != running:
        other = "asynchronous" if running else "synchronous"
        yield _proved(_ASYNC, running, f"{other} scheduling, as the server's stamps of steps and tokens have it")


def _proved(name: str, value: int | bool, basis: str, why: str = "", *, at_least: bool = False) -> Hypothesis:
    """The server had this value of an engine argument, as its own records say."""
    one = argument_hypothesis(name, value, None)
    remedy = stated_as(name, value, at_least=at_least)
    return replace(one, why=why or one.why, remedy=remedy, basis=basis, recorded=True)


def _bound(steps: Rows, name: str, most: int) -> str:
    """In words, why the most that steps have is a limit of the server; empty if it may be a maximum of the load."""
    if name == "max_num_batched_tokens":
        full = steps.where(f"prefill_tokens + decode_tokens = {most}")
        seen = full.aggregate(steps="count(*)", mixes="count(DISTINCT decode_tokens)")
        several = seen["steps"] >= MIN_FULL_STEPS and seen["mixes"] >= MIN_MIXES
        return f"{seen['steps']:,} of its steps have exactly that many tokens, and none more" if several else ""
    seen = steps.where("waiting_depth > 0").aggregate(
        steps="count(*)",
        below=f"count(*) FILTER (running_depth < {most})",
        free="min(1.0 * kv_blocks_free / nullif(kv_blocks_total, 0))",
    )
    if seen["steps"] < MIN_WAITING_STEPS or seen["below"] > MAX_BELOW_LIMIT * seen["steps"]:
        return ""
    spare = seen["free"] is not None and float(seen["free"]) >= MIN_FREE_BLOCKS
    return f"as many run in {seen['steps']:,} steps in which others wait, and KV blocks are free" if spare else ""
