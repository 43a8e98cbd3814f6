"""Which steps computed which request, from what the server's log counts in each step.

Requests are admitted in the order in which they arrived.  The prefill count of a step says how many requests begin.
The decode count of the next step says how many of them have their first token.  From then on a request decodes one
token per step until its last.  No clock is needed.  The difference between prompt tokens and computed tokens is the
prefix-cache hit, in whole blocks.

Following ends at counts that the known requests cannot explain: one was preempted, given up, or is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows

NONE = -1

# Requests as an engine served them, in order of arrival; null: not recorded.
SERVED_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,  # null: only the server recorded it
    "request_id": pl.String,
    "arrived_us": pl.Int64,  # at the server where it says so, else sent
    "at_server": pl.Boolean,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cached_prompt_tokens": pl.Int64,
    "queue_us": pl.Int64,
    "prefill_us": pl.Int64,
    "decode_us": pl.Int64,
    "first_token_us": pl.Int64,  # when the client, or the API server, had it
    "last_token_us": pl.Int64,
    "status": pl.String,
}
# Requests that arrive almost at once can reach the engine in another order.
_LOOK_AHEAD = 3  # requests behind the next one that are tried as well
_MOST_TRIED = 200  # orders that are tried for one step
_MOST_BEGINNINGS = 64  # first steps that are tried: the server may have served unrecorded requests before
MOST_STEPS = 2_000_000


def served_requests(requests: Rows, lifecycles: Rows) -> pl.DataFrame:
    """``SERVED_SCHEMA`` by arrival: the requests that the server traced, and the client's others."""
    own = requests.select(
        "request_index",
        "request_id",
        *("prompt_tokens", "output_tokens", "cached_prompt_tokens", "queue_us", "prefill_us", "decode_us", "status"),
        sent_us=pl.col("arrival_us"),
        first_token_us=pl.col("arrival_us") + pl.col("ttft_us"),
        last_token_us=pl.col("arrival_us") + pl.col("e2e_us"),
    )
    traced = lifecycles.select(
        "request_index",
        *("prompt_tokens", "output_tokens", "cached_prompt_tokens", "status"),
        request_id=pl.col("api_request_id"),
        arrived_us=pl.coalesce("arrived_us", "queued_us"),
        first_token_us=pl.col("first_response_us"),
        last_token_us=pl.col("departed_us"),
    )
    known = traced.drop_nulls("request_index").unique("request_index", keep="first", maintain_order=True)
    joined = own.join(known, on="request_index", how="left", suffix="_traced")
    alone = traced.filter(pl.col("request_index").is_null()).with_columns(pl.lit(None, pl.Int64).alias("sent_us"))
    # The prompt as the server counts it; lengths of output are what the client's events were checked against.
    preferred = {
        "request_id": pl.coalesce("request_id", "request_id_traced"),
        "prompt_tokens": pl.coalesce("prompt_tokens_traced", "prompt_tokens"),
        "output_tokens": pl.coalesce("output_tokens_traced", "output_tokens"),
        "cached_prompt_tokens": pl.coalesce("cached_prompt_tokens_traced", "cached_prompt_tokens"),
    }
    both = pl.concat([joined.with_columns(**preferred), alone], how="diagonal_relaxed")
    at_server = pl.col("arrived_us").is_not_null()
    return (
        both.with_columns(pl.coalesce("arrived_us", "sent_us").alias("arrived_us"), at_server.alias("at_server"))
        .sort("arrived_us", "request_index", maintain_order=True)
        .select(pl.col(name).cast(kind) for name, kind in SERVED_SCHEMA.items())
    )


@dataclass(frozen=True)
class Followed:
    """How requests went through the steps of one engine: int64 arrays by row of the requests, NONE where unknown.

    ``admitted``, ``first``, ``last``: the step (row of the iterations) that admitted it, that computed its first token
    and its last.  ``computed``: its computed prompt tokens.  ``shared_hit``: prompt tokens that the prefix cache held
    of it or of another request whose prefill overlaps, 0 without such.
    ``begin``: steps before it served requests that no file records.  ``end``: the first step whose counts could not be
    explained, or the number of steps.  ``why``: what is wrong with them, ``""`` if all steps are explained;
    ``since``: the step in which the prefills began that overlap with those of ``end``.
    """

    admitted: Int64s
    first: Int64s
    last: Int64s
    computed: Int64s
    shared_hit: Int64s
    begin: int
    end: int
    why: str
    since: int = 0


def followed(iterations: pl.DataFrame, served: pl.DataFrame, block_size: int, caching: bool) -> Followed:
    """Follow ``served`` (``SERVED_SCHEMA``) through the steps, from the first step that lets it go furthest.

    ``iterations``: their counts of requests and tokens; ``block_size``, ``caching``: of the prefix cache.
    """
    lengths = _Lengths(served, block_size if caching else 0)
    empty_before = (iterations["decode_requests"] == 0) & (iterations["prefill_requests"] > 0)
    best: Followed | None = None
    for begin in empty_before.arg_true().head(_MOST_BEGINNINGS).to_list():
        walked = _Walk(iterations, lengths, begin).go()
        if best is None or walked.end - walked.begin > best.end - best.begin:
            best = walked
        if not walked.why or (best.begin < begin and best.end - best.begin > iterations.height // 2):
            break
    nothing = np.full(served.height, NONE, np.int64)
    return best or Followed(nothing, nothing, nothing, nothing, nothing, 0, 0, "no step begins with an empty engine")


class _Lengths:
    """Lengths of the requests as lists, for looking at them one by one."""

    def __init__(self, served: pl.DataFrame, block_size: int) -> None:
        self.block_size = block_size
        self.prompt: list[int] = served["prompt_tokens"].fill_null(0).to_list()
        self.output: list[int] = served["output_tokens"].fill_null(0).to_list()
        self.cached: list[int] = served["cached_prompt_tokens"].fill_null(NONE).to_list()
        usable = (served["prompt_tokens"] > 0) & (served["output_tokens"] > 0)
        self.unknown = next((i for i, ok in enumerate(usable.fill_null(False).to_list()) if not ok), len(self.cached))

    def can_hold(self, request: int) -> int:
        """Prompt tokens of a request that the prefix cache may hold: whole blocks, never the last token."""
        if self.cached[request] != NONE or not self.block_size:
            return 0
        return (self.prompt[request] - 1) // self.block_size * self.block_size

    def work(self, request: int) -> int:
        """Prompt tokens to compute if the cache holds nothing that is not recorded."""
        return self.prompt[request] - max(self.cached[request], 0)


@dataclass
class _Walk:
    """One pass over the steps."""

    iterations: pl.DataFrame
    lengths: _Lengths
    begin: int
    why: str = ""
    at: int = 0
    partial: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)  # whose prefills overlap
    done_by: list[int] = field(default_factory=list)  # their tokens up to each step from ``since`` on
    since: int = 0
    order: list[int] = field(default_factory=list)
    next: int = 0

    def __post_init__(self) -> None:
        requests = len(self.lengths.prompt)
        self.order = list(range(requests))
        self.found = {name: [NONE] * requests for name in ("admitted", "first", "last", "computed")}
        self.found["shared_hit"] = [0] * requests
        names = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
        self.prefills, self.prefill_tokens, self.decodes, decode_tokens = (self.iterations[n].to_numpy() for n in names)
        self.ending = [0] * (len(self.prefills) + 1)
        self.of_step = self.prefill_tokens + decode_tokens

    def go(self) -> Followed:
        steps = len(self.prefills)
        # Steps of decodes alone explain themselves as long as nothing ends: most are passed over at once.
        prefill, decode = self.prefills.tolist(), self.decodes.tolist()
        for step in range(self.begin, steps):
            self.at = step
            following = decode[step + 1] if step + 1 < steps else 0
            going_on = decode[step] - self.ending[step]
            if prefill[step] == 0 and not self.partial and following == going_on:
                continue
            self.why = self._take(step, prefill[step])
            if not self.why and step + 1 < steps and not 0 <= following - going_on <= self._several(self.partial):
                self.at, self.why = step + 1, self._wrong_decodes(following - going_on)
            self.why = self.why or self._finish(step, following - going_on, step + 1 == steps)
            if self.why:
                break
        else:
            self.at = steps
        columns = {name: np.array(values, np.int64) for name, values in self.found.items()}
        return Followed(**columns, begin=self.begin, end=self.at, why=self.why, since=self.since)

    def _take(self, step: int, prefills: int) -> str:
        """The requests that begin in a step."""
        new = prefills - len(self.partial)
        if new < 0:
            return f"{len(self.partial)} requests were in prefill, and {prefills} went on"
        if self.next + new > len(self.order):
            return f"{self.next + new - len(self.order)} requests in prefill that no file records"
        taken = self.order[self.next : self.next + new]
        if any(request >= self.lengths.unknown for request in taken):
            return "a request whose lengths are not recorded"
        if not self.partial and new:
            self.since = step
            taken = self._fitting(step, taken)
        for request in taken:
            self.found["admitted"][request] = step
        self.next += new
        self.partial += taken
        self.members += taken
        self.done_by.append(int(self.prefill_tokens[step]) + (self.done_by[-1] if self.done_by else 0))
        return ""

    def _fitting(self, step: int, taken: list[int]) -> list[int]:
        """Those that begin, or others that came almost at the same time, if only they can be what was computed."""
        tokens = int(self.prefill_tokens[step])
        if self._possible(taken, tokens) or self._is_cut(taken, tokens):
            return taken
        window = self.order[self.next : self.next + len(taken) + _LOOK_AHEAD]
        for tried, others in enumerate(combinations(window, len(taken))):
            if tried == _MOST_TRIED:
                break
            if max(others) < self.lengths.unknown and self._possible(list(others), tokens):
                rest = [request for request in window if request not in others]
                self.order[self.next : self.next + len(window)] = [*others, *rest]
                return list(others)
        return taken

    def _is_cut(self, taken: list[int], tokens: int) -> bool:
        """Whether the last of them may go on in the next step: where this one has as many tokens as any."""
        following = self.at + 1
        goes_on = following < len(self.of_step) and int(self.prefills[following]) > 0
        return goes_on and tokens < sum(map(self.lengths.work, taken)) and self.of_step[self.at] == self.of_step.max()

    def _possible(self, requests: list[int], tokens: int) -> bool:
        """Whether these prompts can need ``tokens`` computed tokens, with whole blocks found in the prefix cache."""
        held = sum(map(self.lengths.work, requests)) - tokens
        block = self.lengths.block_size
        return held == 0 or (0 < held <= sum(map(self.lengths.can_hold, requests)) and held % block == 0)

    def _several(self, requests: list[int]) -> int:
        """How many of them decode after their first token."""
        return sum(self.lengths.output[request] > 1 for request in requests)

    def _wrong_decodes(self, finished: int) -> str:
        several = self._several(self.partial)
        if finished < 0:
            return f"{-finished} fewer requests in decode than have tokens to come"
        return f"{finished - several} more requests in decode than are known"

    def _finish(self, step: int, finished: int, is_last: bool) -> str:
        """The requests that have their first token by the next step, which has ``finished`` more decodes."""
        done = len(self.partial)
        while done and self._several(self.partial[:done]) > finished and not is_last:
            done -= 1
        for request in self.partial[:done]:
            self.found["first"][request] = step
            last = step + self.lengths.output[request] - 1
            self.found["last"][request] = last
            if last > step and last < len(self.ending):
                self.ending[last] += 1
        self.partial = self.partial[done:]
        return "" if self.partial else self._close()

    def _close(self) -> str:
        """What the prefix cache held of the requests whose prefills overlap: of the latest, where it can be several."""
        members, done = self.members, self.done_by
        self.members, self.done_by = [], []
        if not self._possible(members, done[-1]):
            prompts = sum(map(self.lengths.work, members))
            return f"{done[-1]:,} prompt tokens were computed of {len(members)} requests that have {prompts:,}"
        left = held = sum(map(self.lengths.work, members)) - done[-1]
        after, before = sum(map(self.lengths.can_hold, members)), 0
        for place, request in enumerate(members):
            own, work = self.lengths.can_hold(request), self.lengths.work(request)
            after -= own
            # It ended in a step in which those behind it had tokens, so that these were not left for it.
            step = self.found["first"][request]
            behind = sum(self._least(other, step) for other in members[place + 1 :])
            needed = max(before + work - (done[step - self.since] - behind), left - after, 0)
            block = self.lengths.block_size or 1
            hit = min(-(-needed // block) * block, own, left)
            left, before = left - hit, before + work - hit
            self.found["computed"][request] = work - hit
            self.found["shared_hit"][request] = held if len(members) > 1 else 0
        return ""

    def _least(self, request: int, step: int) -> int:
        """The least prompt tokens that a request has in a step up to which others kept it from having any."""
        if self.found["admitted"][request] > step:
            return 0
        ends = self.found["first"][request] == step
        return max(self.lengths.work(request) - self.lengths.can_hold(request), 1) if ends else 1


@dataclass(frozen=True)
class FollowedLog:
    """``iterations``: the log's steps with requests, up to the first that is missing.

    ``walk``: how ``served`` (``SERVED_SCHEMA``) goes through them, by index.
    """

    iterations: pl.DataFrame
    served: pl.DataFrame
    walk: Followed

    @property
    def remark(self) -> str:
        """Which steps the requests do not explain, in words."""
        walk, steps = self.walk, self.iterations.height
        parts = [f"iterations before {walk.begin:,} served requests that no file records"] if walk.begin else []
        if walk.why:
            parts.append(
                f"at iteration {walk.end:,} of {steps:,} their counts are not those of the requests: {walk.why}"
            )
        return "when iterations began: " + "; ".join(parts) if parts else ""


def followed_log(recording: Recording, served: pl.DataFrame | None = None) -> tuple[FollowedLog | None, str]:
    """The iterations of one engine, without gaps, with their requests; or None and the reason why not.

    ``served``: what is assumed of the requests in the place of what is recorded.  The reason is empty
    without iterations.
    """
    of = recording.iterations.aggregate(engines="count(DISTINCT engine)", first="min(iteration)", steps="count(*)")
    if not of["steps"]:
        return None, ""
    if of["engines"] > 1:
        return None, f"{of['engines']} engines served the requests, and nothing tells which of them served which"
    if of["first"] > 1:
        return (
            None,
            f"the log begins with iteration {of['first']:,}, so that the requests then in the engine are not known",
        )
    if of["steps"] > MOST_STEPS:
        return None, f"more than {MOST_STEPS:,} of them"
    frame = recording.iterations.frame()
    gaps = (frame["iteration"].diff() > 1).arg_true()
    whole = frame.head(int(gaps[0]) if len(gaps) else frame.height).filter(~pl.col("dummy"))
    served = served_requests(recording.requests, recording.lifecycles) if served is None else served
    block_size, caching = recording.argument("block_size", 1), recording.argument("enable_prefix_caching", True)
    return FollowedLog(whole, served, followed(whole, served, block_size, caching)), ""
