"""Laws that every simulator of such a server must keep, each as data, and their trial.

No recording is needed to try them: requests follow from each other, and so do the answers to them (metamorphic tests;
Chen et al., ACM Computing Surveys 51, 2018).  An experiment only lends its engine arguments and some of its requests.
Where a simulator takes step times from a release, it gets ``_release``, in which all that must matter does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ExperimentError, counted, printable
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned, table_of
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.simulator import Simulated, Simulator, model_of
from blis_replay.validate.comparison.verdict_text import toned
from blis_replay.validate.judgement import Verdict, exit_code, worst
from blis_replay.validate.text.answer import Answer, Block, Line, Part

_LOAD = 100  # requests of the recording that are tried
_BURST = 64  # of them, those that are sent at once
_CROWD = 8  # requests alike
_LATER_US = 60_000_000  # another zero of the clock
_FAR = 20  # times the longest latency, after which a server is idle for sure
_SECOND_US = 1_000_000
_UNEVEN_US = 618_034  # the golden section of a second, whose multiples spread evenly over it
_PROMPT, _OUTPUT = 2_048, 64  # tokens of a long prompt and of an answer, where the context has room for them
_BUDGET = 512  # tokens per step of the smaller of two budgets, below a long prompt

Requests = RequestTrace


class NotTriedError(Exception):
    """Why a law says nothing of this simulator or this engine."""


@dataclass(frozen=True)
class Law:
    """A statement about the answers of any simulator.

    ``claim``: what holds; ``source``: why; ``unless``: when it does not hold.  ``tried``: the size of the error, a
    share; raises ``NotTriedError``.  ``tolerance``: the largest error that still passes.  ``excuses``: words by which a
    simulator says that it does not model this.
    """

    name: str
    claim: str
    source: str
    unless: str
    tolerance: float
    tried: Callable[[Trial], float]
    excuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ruling:
    """What became of a law; ``error``: None where it could not be tried, for the ``reason``."""

    law: Law
    verdict: Literal["holds", "broken", "not applicable"]
    error: float | None
    reason: str = ""


class Trial:
    """The answers of one simulator to requests that are made of each other, each asked for once."""

    def __init__(self, simulator: Simulator, recording: Recording, mode: ReplayMode) -> None:
        plan = plan_replay(recording, mode).at_recorded_times
        engine = replace(plan.engine, speculation=None)
        self.plan: ReplayPlan = replace(plan, engine=engine, cycles=None, delivery_us=None, pace=None)
        self.engine = engine
        self._simulator: Any = simulator
        kept = slice(0, _LOAD)
        arrival_us = plan.trace.arrival_us[kept] - plan.trace.arrival_us[0]
        self.requests = _requests(arrival_us, plan.trace.prompt_tokens[kept], plan.trace.output_tokens[kept])
        self.prompt = max(min(_PROMPT, engine.max_model_len // 2), 1)
        self.output = max(min(_OUTPUT, engine.max_model_len // 8), 2)

    def served(self, requests: Requests, scale: float = 1.0, **engine: Any) -> Simulated:
        """Its answers to requests; ``scale``: of the coefficients; ``engine``: other engine arguments."""
        plan = replace(self.plan, trace=requests, engine=replace(self.engine, **engine))
        simulator = replace(self._simulator, release=_release(plan.recording, scale))
        answers: Simulated = simulator.serve(plan)
        return answers

    @cached_property
    def load(self) -> Simulated:
        """The answers to the recorded requests, without shared prefixes."""
        return self.served(self.requests)

    @cached_property
    def faster(self) -> Simulated:
        """The same where every step takes half as long; raises ``NotTriedError`` if it has step times of its own."""
        answers = self.served(self.requests, 0.5)
        if _apart(self.load, answers) == 0:
            raise NotTriedError("its step times are its own, and not those of a release")
        return answers

    @cached_property
    def _gap_us(self) -> int:
        alone = self.served(_requests(np.zeros(1), self.prompt, 2 * self.output))
        return _FAR * (int(alone.e2e_us[0]) + 1)

    def far_apart(self, prompts: Any, outputs: Any, count: int, blocks: BlockKeys | None = None) -> Simulated:
        """Requests that do not meet, each sent at another moment of a second."""
        i, apart_us = np.arange(count), (self._gap_us // _SECOND_US + 1) * _SECOND_US
        return self.served(_requests(i * apart_us + i * _UNEVEN_US % _SECOND_US, prompts, outputs, blocks))

    @cached_property
    def alike(self) -> Simulated:
        """Requests of one length that do not meet."""
        return self.far_apart(self.prompt // 8 + 1, self.output, _CROWD)

    @cached_property
    def crowd(self) -> Simulated:
        """The same requests, all sent at once."""
        return self.served(self.at_once)

    @property
    def at_once(self) -> Requests:
        """Requests of one length, sent at once."""
        return _requests(np.zeros(_CROWD), self.prompt // 8 + 1, self.output)

    @property
    def burst(self) -> Requests:
        """Recorded requests, sent at once."""
        kept = self.requests.part(slice(0, _BURST))
        return replace(kept, arrival_us=np.zeros(len(kept), np.int64))

    def shared(self, backwards: bool = False) -> Requests:
        """The recorded requests in fours that share their prompts; ``backwards``: with other ids of the same blocks."""
        of_prompt = self.requests.prompt_tokens // self.engine.block_size
        group, most = np.arange(len(of_prompt)) // 4, int(of_prompt.max())
        keys = np.arange((int(group[-1]) + 1) * max(most, 1), dtype=np.int32)
        blocks = BlockKeys(group * most, of_prompt, keys[::-1].copy() if backwards else keys, self.engine.block_size)
        return replace(self.requests, block_keys=blocks)

    def refuse_ranks(self) -> None:
        """Raise ``NotTriedError`` where several engines serve, or another rule than first come, first served."""
        if self.engine.data_parallel_size > 1 or self.engine.scheduling_policy != "fcfs":
            raise NotTriedError("the engine has ranks, or another policy than fcfs")


def _requests(arrival_us: Any, prompts: Any, outputs: Any, blocks: BlockKeys | None = None) -> Requests:
    count = len(arrival_us)
    sent_us, prompt, output = (np.broadcast_to(v, count).astype(np.int64) for v in (arrival_us, prompts, outputs))
    return RequestTrace(sent_us, prompt, prompt, output, np.full(count, NEVER_US), block_keys=blocks)


def _release(recording: Recording, scale: float) -> CoefficientRelease:
    """Step times and delays like those of an 8 GB model on an H100, all times ``scale``."""
    step, prefill, decode, context = (round(scale * ns) for ns in (6_000_000, 40_000, 20_000, 100))
    latency = LatencyModel("blackbox", step, prefill, decode, context)
    delays = Lifecycle(pre_queue_us=2_000 * scale, post_token_us=200 * scale)
    entry = ModelEntry(model_of(recording), recording.tensor_parallelism or 1, latency=latency, lifecycle=delays)
    return CoefficientRelease("laws", "valid", "To try laws with.", "blis-replay", "any", models=(entry,))


def _apart(a: Simulated, b: Simulated, first: Bools | None = None, whole: Bools | None = None) -> float:
    """How far answers to the same requests are apart, in shares of their mean; of TTFT and E2E the larger.

    ``first``, ``whole``: bool[n], requests whose first token, and whose end, are compared.
    """
    both, shares = a.completed & b.completed, []
    for name, kept in (("ttft_us", first), ("e2e_us", whole)):
        chosen = both if kept is None else both & kept
        mine, other = (getattr(side, name)[chosen].astype(np.float64) for side in (a, b))
        shares += [float(np.abs(other - mine).mean() / max(mine.mean(), 1.0))] if chosen.any() else []
    if not shares:
        raise NotTriedError("no request was completed on both sides")
    return max(shares)


def _part(answers: Simulated, kept: slice) -> Simulated:
    columns = ("completed", "ttft_us", "e2e_us")
    return replace(answers, engine=None, scheduled_us=None, **{name: getattr(answers, name)[kept] for name in columns})


# -- Trials: each gives the size of an error, and its docstring is the claim -------------------------------------

LAWS: list[Law] = []
_QUEUES = ("queue", "batch")


def _law(
    name: str, tolerance: float, source: str, unless: str = "", excuses: tuple[str, ...] = ()
) -> Callable[[Callable[[Trial], float]], Callable[[Trial], float]]:
    """Add a trial to the laws, whose fields these are."""

    def added(tried: Callable[[Trial], float]) -> Callable[[Trial], float]:
        LAWS.append(Law(name, tried.__doc__ or "", source, unless, tolerance, tried, excuses))
        return tried

    return added


@_law(
    "own trace",
    0.001,
    "a replay has no other input than its trace",
    "the simulator draws at random without a fixed seed",
)
def _own_trace(t: Trial) -> float:
    """The same requests again, or one minute later, get the same latencies."""
    later = replace(t.requests, arrival_us=t.requests.arrival_us + _LATER_US)
    return max(_apart(t.load, t.served(t.requests)), _apart(t.load, t.served(later)))


@_law("conservation", 0.0, "an engine drops nothing by itself, and each token takes a step", "clients give up")
def _conserved(t: Trial) -> float:
    """Each request that is sent ends, its first token after its send and its last token after its first."""
    wrong = [
        ~of.completed | (of.ttft_us <= 0) | ((sent.output_tokens > 1) & (of.e2e_us <= of.ttft_us))
        for sent, of in ((t.requests, t.load), (t.burst, t.served(t.burst)))
    ]
    return float(np.concatenate(wrong).mean())


@_law("causality", 0.001, "causes come before effects", "the simulator gives averages of a whole run")
def _causal(t: Trial) -> float:
    """What was answered before a request was sent does not depend on that request."""
    sent_us, ends_us = t.requests.arrival_us, t.requests.arrival_us + t.load.e2e_us
    cut = max(len(sent_us) // 2, int(np.searchsorted(sent_us, ends_us.min(), "right")))
    if cut >= len(sent_us):
        raise NotTriedError("no request ends before the last is sent")
    known, until_us = slice(0, cut), sent_us[cut]
    first = sent_us[known] + t.load.ttft_us[known] < until_us
    return _apart(_part(t.load, known), t.served(t.requests.part(known)), first, ends_us[known] < until_us)


@_law(
    "pause",
    0.001,
    "an idle engine keeps nothing but its prefix cache, and here no prompt is shared",
    "first uses of kernels are simulated",
)
def _after_a_pause(t: Trial) -> float:
    """After a pause in which all requests end, the same requests get the same latencies."""
    pause_us = int(t.requests.arrival_us[-1]) + _FAR * int(t.load.e2e_us.max())
    count, columns = len(t.requests), (t.requests.arrival_us, t.requests.prompt_tokens, t.requests.output_tokens)
    sent_us, prompts, outputs = (np.concatenate([values, values]) for values in columns)
    sent_us[count:] += pause_us
    twice = t.served(_requests(sent_us, prompts, outputs))
    return max(_apart(t.load, _part(twice, part)) for part in (slice(0, count), slice(count, None)))


@_law(
    "alone", 0.01, "who meets nobody waits for nobody", "the engine has a clock of its own, such as a polling interval"
)
def _alone(t: Trial) -> float:
    """Requests of one length that do not meet have one latency, whenever they are sent."""
    return max(float(us.max() / max(us.min(), 1)) - 1 for us in (t.alike.ttft_us, t.alike.e2e_us))


@_law("company", 0.01, "a step with more in it takes no less time", "prefixes are shared", excuses=_QUEUES)
def _company(t: Trial) -> float:
    """No request is served sooner among others than alone."""
    pairs = ((t.crowd.ttft_us, t.alike.ttft_us), (t.crowd.e2e_us, t.alike.e2e_us))
    return max(0.0, *(1 - float(us.min() / max(np.median(alone_us), 1)) for us, alone_us in pairs))


@_law(
    "batching",
    0.75,
    "a step reads the weights once for all its requests (roofline)",
    "the engine has no room for eight",
    excuses=_QUEUES,
)
def _batched(t: Trial) -> float:
    """Eight requests sent at once take at most 75 % of the time of eight one after another."""
    blocks = t.engine.num_gpu_blocks or NEVER_US
    room = _CROWD * (t.prompt // 8 + 1 + t.output) < (blocks - 2) * t.engine.block_size
    if t.engine.max_num_seqs < _CROWD or not room:
        raise NotTriedError(f"the engine has no room for {_CROWD} requests at once")
    return float(t.crowd.e2e_us.max()) / max(_CROWD * float(np.median(t.alike.e2e_us)), 1.0)


@_law("order of ids", 0.0, "vLLM serves first come, first served", "another policy, or several ranks", excuses=_QUEUES)
def _in_order(t: Trial) -> float:
    """Of requests of one length, who was sent first gets the first token first."""
    t.refuse_ranks()
    sent = _requests(1_000 * np.arange(2 * _CROWD), t.prompt // 8 + 1, t.output)
    first_us = sent.arrival_us + t.served(sent, max_num_seqs=2).ttft_us
    return float((np.diff(first_us) < 0).mean())


@_law("one at a time", 0.05, "the definition of max_num_seqs", "several ranks", excuses=_QUEUES)
def _one_at_a_time(t: Trial) -> float:
    """With max_num_seqs 1, requests end at least one decode time apart."""
    t.refuse_ranks()
    ends_us = np.sort(t.served(t.at_once, max_num_seqs=1).e2e_us)
    return max(0.0, 1 - float(np.diff(ends_us).min()) / max(float(np.median(t.alike.e2e_us - t.alike.ttft_us)), 1.0))


@_law(
    "lengths", 0.25, "each step gives a request one token", "speculative decoding; attention that outweighs the weights"
)
def _lengths(t: Trial) -> float:
    """Twice the output, twice the decode time; no first token is faster than a later one, or a shorter prompt's."""
    prompts, outputs = [t.prompt // 8 + 1, t.prompt, t.prompt // 8 + 1], [t.output, t.output, 2 * t.output]
    of = t.far_apart(prompts, outputs, 3)
    decode_us = (of.e2e_us - of.ttft_us).astype(np.float64)
    grown = decode_us[2] / max(decode_us[0], 1.0) * (t.output - 1) / (2 * t.output - 1)
    first_us = of.ttft_us.astype(np.float64)
    least_us = max(first_us[0], float(decode_us[0]) / (t.output - 1))
    return max(abs(float(grown) - 1), 1 - float(first_us.min() / max(least_us, 1.0)))


@_law("block names", 0.001, "ids are names, and only their equality has a meaning")
def _ids(t: Trial) -> float:
    """Other ids of the same prompt blocks change nothing."""
    return _apart(t.served(t.shared()), t.served(t.shared(backwards=True)))


@_law("unshared prompts", 0.001, "a prefix cache finds only what was computed before")
def _unshared(t: Trial) -> float:
    """Prompt blocks that no other request has change nothing."""
    count = t.requests.prompt_tokens // t.engine.block_size
    start: Int64s = np.cumsum(count) - count
    blocks = BlockKeys(start, count, np.arange(count.sum(), dtype=np.int32), t.engine.block_size)
    return _apart(t.load, t.served(replace(t.requests, block_keys=blocks)))


@_law(
    "cache hits",
    0.5,
    "tokens that are found are not computed",
    "the engine caches no prefixes",
    excuses=("prefix", "cache"),
)
def _hits(t: Trial) -> float:
    """A prompt in the prefix cache saves at least half of what its tokens cost."""
    size = t.engine.block_size
    count = t.prompt // size
    if not t.engine.enable_prefix_caching or count < 2:
        raise NotTriedError("the engine caches no prefixes")
    blocks = BlockKeys(np.zeros(4, np.int64), np.full(4, count), np.arange(count, dtype=np.int32), size)
    whole_us, hit_us, least_us = (
        float(t.far_apart(prompt, t.output, 4, of).ttft_us[1:].mean())
        for prompt, of in ((count * size, None), (count * size, blocks), (size, None))
    )
    if whole_us <= 1.01 * least_us:
        raise NotTriedError("a longer prompt takes it no longer")
    return max(0.0, 1 - (whole_us - hit_us) / (whole_us - least_us))


@_law(
    "scale",
    0.05,
    "no unit of time is special; rounding to 1 us puts few requests into another step",
    "the step times are the simulator's own",
)
def _scaled(t: Trial) -> float:
    """All times twice as long give latencies twice as long."""
    _ = t.faster  # without step times of a release there is nothing to scale
    slower = t.served(replace(t.requests, arrival_us=2 * t.requests.arrival_us), 2.0)
    return _apart(replace(t.load, ttft_us=2 * t.load.ttft_us, e2e_us=2 * t.load.e2e_us), slower)


@_law(
    "shorter steps",
    0.01,
    "the same arrivals find a server with less to do",
    "the step times are the simulator's own; single requests may lose (Graham 1969)",
)
def _faster(t: Trial) -> float:
    """Steps of half the length lengthen no mean latency."""
    means = ((float(of.ttft_us.mean()), float(of.e2e_us.mean())) for of in (t.load, t.faster))
    return float(max(0.0, *(after / max(before, 1.0) - 1 for before, after in zip(*means, strict=True))))


@_law("more memory", 0.02, "what fits still fits", "by the order of requests, up to the tolerance (Graham 1969)")
def _more_memory(t: Trial) -> float:
    """Twice the KV blocks do not lengthen a burst."""
    burst = t.burst
    blocks = -(-(burst.prompt_tokens + burst.output_tokens) // t.engine.block_size) + 1
    tight = 2 + max(int(blocks.max()), int(blocks.sum()) // 4)
    return _longer(*(t.served(burst, num_gpu_blocks=times * tight) for times in (1, 2)))


@_law(
    "higher budget",
    0.02,
    "what fits in a step still fits",
    "by the order of requests, up to the tolerance (Graham 1969)",
)
def _higher_budget(t: Trial) -> float:
    """Twice max_num_batched_tokens does not lengthen a burst."""
    whole = 0 if t.engine.enable_chunked_prefill else int(t.burst.prompt_tokens.max())
    budget = max(_BUDGET, t.engine.max_num_seqs, whole)
    return _longer(*(t.served(t.burst, max_num_batched_tokens=times * budget) for times in (1, 2)))


def _longer(less: Simulated, more: Simulated) -> float:
    return max(0.0, float(more.e2e_us.max()) / max(float(less.e2e_us.max()), 1.0) - 1)


# -- Rulings ----------------------------------------------------------------------------------------------------


def rulings(simulator: Simulator, recording: Recording, mode: ReplayMode) -> Iterator[Ruling]:
    """What becomes of each law, in their order; raises what the simulator raises for recorded requests.

    A simulator that fails on other requests breaks the law, and one that breaks it and says so itself is excused.
    """
    trial = Trial(simulator, recording, mode)
    said = [printable(text) for text in trial.load.differences]
    for law in LAWS:
        try:
            error = law.tried(trial)
        except NotTriedError as why:
            yield Ruling(law, "not applicable", None, str(why))
            continue
        except ExperimentError as why:
            yield Ruling(law, "broken", None, printable(str(why)))
            continue
        excuse = next((text for text in said if any(word in text.lower() for word in law.excuses)), "")
        if error <= law.tolerance:
            yield Ruling(law, "holds", error)
        elif excuse:
            yield Ruling(law, "not applicable", error, f"it says so: {excuse}")
        else:
            yield Ruling(law, "broken", error)


_VERDICTS: dict[str, Verdict] = {"holds": "PASS", "broken": "FAIL"}
_TONES: dict[str, Tone] = {"holds": "good", "broken": "bad"}
_COLUMNS = (Column("law", "text"), Column("error", "share"), Column("at most", "share"), Column("", "word"))


def laws_answer(simulator: str, recording: Recording, found: list[Ruling]) -> Answer:
    """Verdict with the largest errors, a table of all laws, and of those that do not hold what they say.

    PASS: every law that could be tried holds; FAIL: one is broken; NOT JUDGED: none could be tried.
    """
    broken = [ruling for ruling in found if ruling.verdict == "broken"]
    tried = [ruling for ruling in found if ruling.verdict != "not applicable"]
    verdict = worst(_VERDICTS[one.verdict] for one in tried)
    counts = f"{len(tried) - len(broken)} of {counted(len(tried), 'law')} hold"
    apart = f"; not applicable: {len(found) - len(tried)}" if len(tried) < len(found) else ""
    head = Line(f"{verdict}  {simulator}: {counts}{apart}", mark=toned(verdict))
    lent = f"engine arguments and requests of {recording.alias}"
    rows: list[list[Cell]] = [
        [one.law.name, one.error, one.law.tolerance, Toned(one.verdict, _TONES.get(one.verdict, "caution"))]
        for one in found
    ]
    records: list[dict[str, str | float | None]] = [
        {"law": one.law.name, "verdict": one.verdict, "error": one.error, "tolerance": one.law.tolerance}
        | {"claim": one.law.claim, "source": one.law.source, "unless": one.law.unless, "reason": one.reason}
        for one in found
    ]
    not_tried = [f"{one.law.name}: {one.reason}" for one in found if one not in tried]
    start: list[Part] = [Block([head, lent]), Table("", _COLUMNS, rows)]
    return Answer(
        [*start, Block([_said(one) for one in found], "laws")],
        {"verdict": verdict, "simulator": simulator, "experiment": recording.alias, "laws": records},
        table_of(records),
        exit_code([verdict]),
        brief=[*start, Block([_said(one) for one in broken]), Block(not_tried)],
    )


def _said(ruling: Ruling) -> Line:
    law, reason = ruling.law, f" Here: {ruling.reason}." if ruling.reason else ""
    unless = f" Not if: {law.unless}." if law.unless else ""
    return Line(f"{law.name}: {law.claim} Because: {law.source}.{unless}{reason}")
