"""The engine as a step log tells it: its requests, and what each of its steps served, one line after the other.

A request is in prefill until its first output token was processed, as in the steps of a trace; a step yields a
token of each request that has nothing left to compute after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.recording import ARRIVAL_TIME

Row = dict[str, object]
# A server has some thousands at once.
MOST_LIVE = 100_000
_FINISHES = {"STOPPED": "stopped", "LENGTH_CAPPED": "length", "ABORTED": "aborted", "IGNORED": "ignored"}
# The engine puts random hex behind the API server's own id.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.ASCII)
_STATUSES = {"stopped": "ok", "length": "ok", "aborted": "aborted"}


@dataclass
class Arrival:
    """A request as it came, times in ns of the monotonic clock; of one whose arrival was lost, the name alone.

    ``offset_ns``: epoch less monotonic clock, by two stamps taken one after the other.
    """

    name: str
    queued_ns: int | None = None
    arrived_ns: int | None = None
    offset_ns: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass
class Live:
    """A request in the engine: what it has computed since its last admission, and what was noted of it."""

    number: int
    arrival: Arrival
    queued_step: int
    computed_tokens: int = 0
    target_tokens: int = 0  # computed when the prompt, and what it had before a preemption, is done
    output_tokens: int = 0
    output_step: int | None = None  # that gave the last of them
    preemptions: int = 0
    hit_tokens: int | None = None
    stamps: dict[str, int] = field(default_factory=dict)
    admitted: bool = False
    waits_again: bool = False
    torn: bool = False  # steps were lost before its first token, so nothing tells which step gave that


@dataclass(frozen=True)
class Step:
    """One call of ``schedule()``: ``tokens`` by request, ``admitted`` with the tokens that were computed already."""

    number: int
    begin_ns: int
    end_ns: int
    running: int
    waiting: int
    free_blocks: int
    tokens: Sequence[tuple[int, int]]
    admitted: Sequence[tuple[int, int]]
    preempted: Sequence[int]


@dataclass
class Engine:
    """The state of a recorded engine between two lines; ``rows`` gathers what is known, by table.

    ``blocks``: of the KV cache, without the reserved one.  ``speculates``: a step may yield several tokens, which the
    lines then state.  ``conserved``, ``unequal``: requests whose computed tokens are those of prompt and output, and
    others.
    """

    path: str
    blocks: int | None
    speculates: bool
    tells_preemptions: bool = True
    rows: dict[str, list[Row]] = field(
        default_factory=lambda: {name: [] for name in ("steps", "snapshots", "events", "requests")}
    )
    live: dict[int, Live] = field(default_factory=dict)
    in_flight: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    last_step: int = 0
    conserved: int = 0
    unequal: int = 0

    def arrive(self, number: int, arrival: Arrival) -> None:
        """A request joins the queue."""
        if len(self.live) >= MOST_LIVE:
            raise RecordingError(self.path, "", f"more than {MOST_LIVE:,} requests at once", "check the file")
        live = self.live[number] = Live(number, arrival, self.last_step, target_tokens=arrival.prompt_tokens or 0)
        if arrival.queued_ns is not None:
            self._event(live, "journey.QUEUED", arrival.queued_ns, self.last_step)

    def schedule(self, step: Step) -> None:
        """A step begins."""
        if self.rows["steps"] and step.number > self.last_step:
            for waiting in self.live.values():
                waiting.torn |= "first_token_ns" not in waiting.stamps
        # Steps are numbered from 1 in all recordings, and a request that comes before the first has 0.
        self.last_step = step.number + 1
        for number in step.preempted:
            if live := self.live.get(number):
                live.preemptions, live.waits_again = live.preemptions + 1, True
                self._event(live, "journey.PREEMPTED", step.begin_ns, self.last_step)
        for number, computed in step.admitted:
            if live := self.live.get(number):
                self._admit(live, computed, step)
        prefill_requests = prefill_tokens = decode_requests = decode_tokens = 0
        yields: list[tuple[int, bool]] = []
        for number, count in step.tokens:
            live = self.live.get(number)
            first = live is None or live.output_tokens == 0
            prefill_requests, decode_requests = prefill_requests + first, decode_requests + (not first)
            prefill_tokens, decode_tokens = prefill_tokens + first * count, decode_tokens + (not first) * count
            if live is not None:
                yields.append((number, self._compute(live, count)))
        self.in_flight[self.last_step] = yields
        self.rows["steps"].append(
            {
                "step_id": self.last_step,
                "ts_start_ns": step.begin_ns,
                "ts_end_ns": step.end_ns,
                "duration_us": (step.end_ns - step.begin_ns) // 1000,
                "running_depth": step.running,
                "waiting_depth": step.waiting,
                "prefill_requests": prefill_requests,
                "decode_requests": decode_requests,
                "prefill_tokens": prefill_tokens,
                "decode_tokens": decode_tokens,
                "preempted_requests": len(step.preempted) if self.tells_preemptions else None,
                "kv_blocks_total": self.blocks,
                "kv_blocks_free": step.free_blocks if step.free_blocks >= 0 else None,
                "kv_usage": self._usage(step.free_blocks),
            }
        )

    def update(self, step_number: int | None, end_ns: int, produced: Sequence[tuple[int, int]]) -> None:
        """The output of a step is in."""
        if step_number is None:
            return
        yields = self.in_flight.pop(step_number + 1, [])
        counts = produced if self.speculates else [(number, 1) for number, one in yields if one]
        for number, count in counts:
            if live := self.live.get(number):
                self._output(live, count, end_ns, step_number + 1)

    def finish(
        self, number: int, at_ns: int, status: str, output_tokens: int, preemptions: int | None, computed: int
    ) -> None:
        """A request leaves the engine, while the output of a step is processed or because it was given up."""
        live = self.live.pop(number, None)
        if live is None:
            return
        ended = _FINISHES.get(status.removeprefix("FINISHED_"), "error")
        given_up = ended == "aborted"
        # A log can note the end before the output that brought it, or after.  Where no step is in flight, it was lost.
        has_all = 0 < output_tokens == live.output_tokens
        step = live.output_step if has_all else min(self.in_flight, default=None)
        step = self.last_step if given_up else step
        if output_tokens and step is not None and "first_token_ns" not in live.stamps:
            self._output(live, 0, at_ns, step)
        live.output_tokens = output_tokens
        if ended in ("stopped", "length") and live.admitted and live.arrival.prompt_tokens and not self.speculates:
            self._judge(live, computed)
        if preemptions is not None:
            live.preemptions = preemptions
        self._event(live, "journey.FINISHED", at_ns, step, finish_status=ended)
        self._end(live, _STATUSES.get(ended, "error"), at_ns, step)

    def end(self) -> None:
        """Nothing more comes: whoever is in the engine stays unfinished."""
        for live in self.live.values():
            self._end(live, "unfinished", None, None)
        self.live.clear()

    def _admit(self, live: Live, computed: int, step: Step) -> None:
        if live.admitted and not live.waits_again:
            live.preemptions += not self.tells_preemptions
        live.computed_tokens = computed
        live.target_tokens = (live.arrival.prompt_tokens or 0) + live.output_tokens
        if not live.admitted:
            live.hit_tokens, live.torn = computed, False
            live.stamps |= {"scheduled_ns": step.begin_ns, "scheduled_step": self.last_step}
        self._event(live, "journey.SCHEDULED", step.begin_ns, self.last_step)
        live.admitted, live.waits_again = True, False

    def _compute(self, live: Live, count: int) -> bool:
        """Compute ``count`` tokens of a request; whether the step yields an output token of it."""
        before, live.computed_tokens = live.computed_tokens, live.computed_tokens + count
        if before < live.target_tokens:
            # Decodes say nothing more in full than by their number.
            prompt, hit = live.arrival.prompt_tokens, live.hit_tokens
            self.rows["snapshots"].append(
                {
                    "step_id": self.last_step,
                    "request_id": live.arrival.name,
                    "prompt_tokens": prompt,
                    "effective_prompt_tokens": None if prompt is None or hit is None else prompt - hit,
                    "computed_tokens": before,
                    "output_tokens": live.output_tokens,
                    "scheduled_tokens": count,
                }
            )
        return live.computed_tokens >= live.target_tokens

    def _output(self, live: Live, count: int, at_ns: int, step: int) -> None:
        live.output_tokens, live.output_step = live.output_tokens + count, step
        if "first_token_ns" not in live.stamps and not live.torn:
            live.stamps |= {"first_token_ns": at_ns, "first_token_step": step}
            self._event(live, "journey.FIRST_TOKEN", at_ns, step, output_tokens=max(live.output_tokens, 1))

    def _judge(self, live: Live, computed: int) -> None:
        # The last token is not computed, and with two batches in flight one more may have been begun.
        wanted = (live.arrival.prompt_tokens or 0) + live.output_tokens - 1
        if live.computed_tokens == computed and 0 <= computed - wanted <= 1:
            self.conserved += 1
        else:
            self.unequal += 1

    def _usage(self, free: int) -> float | None:
        return 1 - free / self.blocks if self.blocks and 0 <= free <= self.blocks else None

    def _event(self, live: Live, name: str, at_ns: int, step: int | None, **values: object) -> None:
        row = {
            "span_key": live.number,
            "event": name,
            "time_ns": at_ns,
            "offset_ns": live.arrival.offset_ns if name == "journey.QUEUED" else None,
            "step_id": step,
            "output_tokens": live.output_tokens,
        }
        self.rows["events"].append(row | values)

    def _end(self, live: Live, status: str, at_ns: int | None, step: int | None) -> None:
        arrival = live.arrival
        self.rows["requests"].append(
            {
                "span_key": live.number,
                "first_span": live.number,
                "arrival_ns": arrival.queued_ns if arrival.arrived_ns is None else arrival.arrived_ns,
                "api_request_id": _SUFFIX.sub("", arrival.name),
                "core_request_id": arrival.name,
                "arrived_ns": arrival.arrived_ns,
                "arrived_stamp": None if arrival.arrived_ns is None else ARRIVAL_TIME,
                "queued_ns": arrival.queued_ns,
                "queued_step": None if arrival.queued_ns is None else live.queued_step,
                **live.stamps,
                "finished_ns": at_ns,
                "finished_step": step,
                "preemptions": live.preemptions,
                "status": status,
                "prompt_tokens": arrival.prompt_tokens,
                "max_tokens": arrival.max_tokens,
                "output_tokens": live.output_tokens,
                "cached_prompt_tokens": live.hit_tokens,
                "dropped_events": 0,
            }
        )


def pairs_of(value: object) -> Iterator[tuple[int, int]]:
    """``[[a, b], ...]`` as pairs of whole numbers; ``ValueError`` if it is something else."""
    if not isinstance(value, list):
        raise ValueError("not a list of pairs")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("not a list of pairs")
        a, b = numbers_of(pair)
        yield a, b


def numbers_of(values: object) -> list[int]:
    """A list of whole numbers from 0 to 2^61; ``ValueError`` if it is something else."""
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 1 << 61 for value in values):
        raise ValueError("not a list of whole numbers")
    return values
