"""What the simulator is given: requests and engine arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from blis_replay.base.arrays import Bools, Int32s, Int64s
from blis_replay.base.engine_packs import choose_pack
from blis_replay.base.errors import TraceError

if TYPE_CHECKING:
    from blis_replay.blis.speculation import Drafts, Speculation

NEVER_US = 2**62
# The table of steps counts requests in two bytes.
MOST_SEQUENCES = 2**15 - 1
# Limits far above any server, so that one number in a file cannot take all memory.
MOST_BLOCKS = 30_000_000
MOST_TOKENS = 2**24  # of a request
MOST_STEPS = 2**24
MOST_TABLE_CELLS = 2**28  # sequences times blocks of the longest request
# Least and most of each engine argument that is a whole number.
_LIMITS = {
    "max_num_seqs": (1, MOST_SEQUENCES),
    "max_num_batched_tokens": (1, 2**31 - 1),
    "max_model_len": (1, 2**31 - 1),
    "block_size": (1, 2**20),
    "data_parallel_size": (1, 1024),
    "num_gpu_blocks": (2, MOST_BLOCKS),  # one is reserved
    "long_prefill_token_threshold": (0, NEVER_US),
    "max_num_active_seqs": (1, NEVER_US),
    "max_num_scheduled_tokens": (1, NEVER_US),
    "prefill_schedule_interval": (1, NEVER_US),
    "api_server_count": (1, NEVER_US),
}


@dataclass(frozen=True)
class BlockKeys:
    """Identity of the full blocks of each request: equal keys mean equal tokens so far.

    Blocks 0, 1, ... of request i have the keys ``keys[start[i] : start[i] + count[i]]``, small integers from 0.
    Requests with the same prompt may share a row.  The first ``prompt_tokens // block_size`` keys belong to the
    prompt; later ones to generated tokens that another request's prompt repeats.  A block without a key is unique.
    """

    start: Int64s
    count: Int64s
    keys: Int32s
    block_size: int

    def __post_init__(self) -> None:
        if len(self.start) != len(self.count):
            raise TraceError("block keys: start and count differ in length; give one of each per request")
        if len(self.start) and (self.start.min() < 0 or (self.start + self.count).max() > len(self.keys)):
            raise TraceError("block keys: a row reaches beyond the keys; check start and count")
        if len(self.keys) and self.keys.min() < 0:
            raise TraceError("block keys: a key is negative; number them from 0")
        self._refuse_keys_of_two_prefixes()

    def _refuse_keys_of_two_prefixes(self) -> None:
        """Raise unless every key always follows the same key; the prefix cache relies on it."""
        # Each row packed into one number: sorting numbers is ten times faster than sorting pairs.
        radix = int(self.count.max(initial=0)) + 1
        start, count = np.divmod(np.unique((self.start * radix + self.count)[self.count > 0]), radix)
        depth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        places = np.repeat(start, count) + depth
        key = self.keys[places]
        before = np.where(depth == 0, -1, self.keys[places - 1])
        expected = np.empty(int(self.keys.max(initial=-1)) + 1, np.int32)
        expected[key] = before
        wrong = expected[key] != before
        if wrong.any():
            raise TraceError(
                f"block keys: key {key[np.argmax(wrong)]} stands behind two different keys; a key stands for a block "
                "and all before it, so number chains and not blocks"
            )


_COLUMNS = ("prompt_tokens", "prefill_tokens", "output_tokens", "abort_us")
_OPTIONAL = ("priority", "pre_queue_us", "held_us", "external_tokens", "fetched_us")


@dataclass(frozen=True)
class RequestTrace:
    """Requests to simulate: int64 arrays of one length, in order of arrival.

    ``arrival_us``: client send, from the trace's zero.  ``prefill_tokens``: prompt tokens missing from the prefix
    cache, 1 to ``prompt_tokens``; all of them where ``block_keys`` lets the simulated cache decide.
    ``output_tokens``: tokens to generate, at least 1.  ``abort_us``: when the client gives up, or ``NEVER_US``.
    ``priority``: lower is served first; all 0 if None.  Ties go by place in the trace.

    Teacher-forced, if not None: ``pre_queue_us`` (send to waiting queue) replaces the lifecycle's delay.  ``held_us``:
    time after that during which the scheduler ignores the request.  ``drafts``: drafted and accepted tokens of
    speculative decoding.

    ``external_tokens``: leading prompt tokens that another server has computed (disaggregated prefill); those that are
    not cached are loaded, as ``EngineConfig.offloading`` says, whose ``cpu_blocks`` are 0 then.  ``fetched_us``: when
    another server has fetched the KV blocks of a request, from the trace's zero; a request that has ended holds them
    until then, or, with -1, frees them at once.
    """

    arrival_us: Int64s
    prompt_tokens: Int64s
    prefill_tokens: Int64s
    output_tokens: Int64s
    abort_us: Int64s
    priority: Int64s | None = None
    block_keys: BlockKeys | None = None
    pre_queue_us: Int64s | None = None
    held_us: Int64s | None = None
    drafts: Drafts | None = None
    external_tokens: Int64s | None = None
    fetched_us: Int64s | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival_us)
        rows = {name: getattr(self, name) for name in (*_COLUMNS, *_OPTIONAL)}
        rows["block_keys"] = None if self.block_keys is None else self.block_keys.start
        rows["drafts"] = None if self.drafts is None else self.drafts.start
        for name, values in rows.items():
            if values is not None and len(values) != n:
                raise TraceError(f"{name} has {len(values)} values for {n} requests; give one per request")
        if n == 0:
            return
        _refuse(np.diff(self.arrival_us) < 0, "arrival_us runs backwards", "sort the requests by arrival", 1)
        _refuse(self.arrival_us < 0, "arrival_us is negative", "count from the first arrival")
        if self.held_us is not None:
            _refuse(self.held_us < 0, "held_us is negative", "0 holds nothing back")
        if self.external_tokens is not None:
            beyond = (self.external_tokens < 0) | (self.external_tokens > self.prompt_tokens)
            _refuse(beyond, "external_tokens is not within 0 and prompt_tokens", "they are leading prompt tokens")
        if self.fetched_us is not None:
            beyond = (self.fetched_us < -1) | (self.fetched_us >= NEVER_US)
            _refuse(beyond, "fetched_us is not -1 or a time", "-1 frees the blocks of a request as it ends")
        _refuse(self.output_tokens < 1, "output_tokens is below 1", "every request yields at least one token")
        for name in ("prompt_tokens", "output_tokens"):
            _refuse(getattr(self, name) >= 2**31, f"{name} is 2^31 or more", "correct the number, or drop the request")
        _refuse(
            (self.prefill_tokens < 1) | (self.prefill_tokens > self.prompt_tokens),
            "prefill_tokens is not within 1 and prompt_tokens",
            "the last prompt token is always computed",
        )

    def __len__(self) -> int:
        return len(self.arrival_us)

    def part(self, chosen: slice | Bools | Int64s) -> RequestTrace:
        """A trace with only the chosen requests, in the same order; by number in that of the numbers."""
        named = ("arrival_us", *_COLUMNS, *_OPTIONAL)
        columns = {name: values[chosen] for name in named if (values := getattr(self, name)) is not None}
        keys, drafts = self.block_keys, self.drafts
        return replace(
            self,
            **columns,
            block_keys=None if keys is None else replace(keys, start=keys.start[chosen], count=keys.count[chosen]),
            drafts=None if drafts is None else replace(drafts, start=drafts.start[chosen]),
        )


@dataclass(frozen=True)
class Behaviours:
    """Scheduler behaviours that differ between vLLM releases; with all of them off the engine is 0.12.

    No server argument controls them.  The packs in ``fixtures/engines`` list which release has which.
    """

    # A request aborted during a step leaves before its tokens are processed; earlier releases: in the next step.
    aborts_before_tokens: bool = False
    # long_prefill_token_threshold is ignored while only one request is scheduled.
    lone_prefill_uncapped: bool = False
    # Freed blocks without a hash are reused first; earlier releases put them at the end of the free queue.
    uncached_blocks_first: bool = False
    # Priority policy: preempting a request that comes earlier in the pass no longer makes the pass skip one.
    exact_preemption_cursor: bool = False
    # Speculative decoding: lookahead slots are reserved at admission; earlier releases: from the next step.
    lookahead_at_admission: bool = False
    # Speculative decoding: a request admitted for one token gets padded drafts in a step of decodes only.
    single_tokens_padded: bool = False
    # Synchronous scheduling caches a block in the step that accepts its last token; earlier releases: one step later.
    drafts_cached_as_accepted: bool = False
    # Asynchronous scheduling decodes a request once more, without effect, while its last token is in flight.
    decodes_once_more: bool = False
    # A preempted request drops its unverified drafts; earlier releases scheduled their tokens again.
    drafts_end_with_preemption: bool = False
    # If the drafter has a KV cache, the hash of a block also covers the token after it.
    hashes_look_ahead: bool = False
    # Padded drafts beyond max_model_len are dropped at admission; earlier releases made the request wait.
    padding_where_it_fits: bool = False
    # Padded drafts are added even if no running request is in the step.
    padding_without_company: bool = False
    # Priority policy: after a request preempts itself, the pass goes on with the requests after it.
    priority_pass_outlives_preemption: bool = False
    # A sliding window keeps a block while tokens in flight attend to it.
    windows_wait_for_flight: bool = False
    # Of the blocks that a window gives up, those without a hash are reused first.
    windows_free_uncached_first: bool = False
    # Admission counts at most the blocks that a window and the tokens in flight can hold.
    window_admission_bounded: bool = False
    # Offload: CPU memory ranks blocks by the request that used them last, and a request that is looked up again offers
    # all its blocks again.
    offload_follows_requests: bool = False
    # Data parallelism: ranks of dense models step independently; earlier releases: in lockstep.
    dense_ranks_apart: bool = False
    # Data parallelism: ranks also report their request counts before a step, not only after it.
    counts_before_step: bool = False
    # Data parallelism: ties between ranks rotate.
    balancer_ties_rotate: bool = False
    # Data parallelism: a front end also counts its own requests in flight, and full KV caches.
    balancer_counts_in_flight: bool = False


@dataclass(frozen=True)
class KvCacheGroup:
    """Layers with blocks of their own.

    ``kind``: ``full``, ``window`` or ``chunk`` attention, or a ``state`` of one block a request (linear attention).
    ``size``: tokens of the window or chunk, else 0.
    """

    kind: Literal["full", "window", "chunk", "state"]
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "chunk", "state") or (self.size > 0) != (
            self.kind in ("window", "chunk")
        ):
            raise TraceError(f"kv_cache_groups: {self.kind} {self.size}; use full, window N, chunk N or state")


@dataclass(frozen=True)
class Offloading:
    """KV blocks offloaded to CPU memory, as vLLM's ``OffloadingConnector`` does it.

    ``cpu_blocks``: room for them.  A load or a store of n blocks takes ``load_us + n * load_block_us`` or
    ``store_us + n * store_block_us``.
    """

    cpu_blocks: int
    load_us: int
    load_block_us: int
    store_us: int
    store_block_us: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= MOST_BLOCKS:
                raise TraceError(f"offloading: {name} is {value}; 0 to {MOST_BLOCKS} can be simulated")

    def in_words(self) -> str:
        """One line for people."""
        times = f"a load of n blocks takes {self.load_us} + n * {self.load_block_us} us"
        return (
            f"{self.cpu_blocks:,} KV blocks in CPU memory; {times}, a store {self.store_us} + n * {self.store_block_us}"
        )


def why_not_grouped(groups: tuple[KvCacheGroup, ...], speculation: Speculation | None, prefix_caching: bool) -> str:
    """With which other arguments the groups are not simulated; empty if they are."""
    keeps_state = KvCacheGroup("state") in groups
    if groups and speculation is not None and (speculation.lookahead_tokens or keeps_state):
        return "these drafts"
    return "a prefix cache of states" if keeps_state and prefix_caching else ""


def why_not_offloaded(engine: EngineConfig) -> str:
    """With which other argument of an engine an offload of KV blocks is not simulated; empty if it is."""
    with_offload = {
        "drafts": engine.speculation is not None,
        "several ranks": engine.data_parallel_size > 1,
        "several groups of KV blocks": bool(engine.kv_cache_groups),
        "enable_prefix_caching off": not engine.enable_prefix_caching,
        "prefill_schedule_interval above 1": engine.prefill_schedule_interval > 1,
        "decodes of finished requests": engine.async_scheduling and engine.behaviours.decodes_once_more,
    }
    return next((why for why, given in with_offload.items() if given), "")


@dataclass(frozen=True)
class EngineConfig:
    """Engine arguments under vLLM's names.

    ``num_gpu_blocks`` includes the reserved null block, as in vLLM.  None: as many blocks as the requests can use, up
    to a million.  ``long_prefill_token_threshold`` 0 is off.

    Arguments that only newer releases have:

    ``scheduler_reserve_full_isl`` admits a request only if all its known tokens fit.  ``watermark`` is the share of
    blocks that an admission must leave free while other requests run.  ``long_prefill_token_threshold_adaptive``
    never caps a prefill below an equal share of ``max_num_batched_tokens``.  ``max_num_active_seqs`` limits running
    requests below ``max_num_seqs``, and ``max_num_scheduled_tokens`` limits a step below ``max_num_batched_tokens``.
    ``prefill_schedule_interval`` is the number of steps between steps with prefill, while requests decode and the
    queue was emptied.  ``behaviours``: what else differs in the release.

    ``data_parallel_size``: number of ranks, each an engine with these arguments, behind vLLM's balancer with
    ``api_server_count`` front ends (None: one per rank).  ``mixture_of_experts``: the ranks share the experts, and
    so step together.  ``speculation``: speculative decoding, or None.

    ``kv_cache_groups``: layers with blocks of their own, in vLLM's order; none: all layers share their blocks.
    ``prefix_cache_retention_interval``: a window caches the blocks before each multiple of it, None: every block, 0:
    only those that a prompt like the request's own could use.

    ``offloading``: KV blocks offloaded to CPU memory, or None.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    async_scheduling: bool
    block_size: int = 16
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = False
    watermark: float = 0.0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    prefill_schedule_interval: int = 1
    data_parallel_size: int = 1
    api_server_count: int | None = None
    mixture_of_experts: bool = False
    speculation: Speculation | None = None
    kv_cache_groups: tuple[KvCacheGroup, ...] = ()
    prefix_cache_retention_interval: int | None = None
    offloading: Offloading | None = None
    behaviours: Behaviours = field(default_factory=Behaviours)

    @property
    def walked(self) -> bool:
        """Whether the kernel must visit every running request in every step (``kernel.draft_batch``)."""
        once_more = self.async_scheduling and self.behaviours.decodes_once_more
        return self.speculation is not None or once_more or self.offloading is not None

    @property
    def hash_lookahead_tokens(self) -> int:
        """Tokens after a block that its key also covers."""
        drops = self.speculation is not None and self.speculation.drops_last_hit
        return 1 if drops and self.behaviours.hashes_look_ahead and self.enable_prefix_caching else 0

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise TraceError(f"{name} is {value}; it must be at least {least}")
            if value is not None and value > most:
                raise TraceError(f"{name} is {value}; at most {most} can be simulated")
        if self.speculation is not None and self.data_parallel_size > 1:
            raise TraceError("speculative decoding is simulated without ranks; leave out data_parallel_size")
        why = why_not_grouped(self.kv_cache_groups, self.speculation, self.enable_prefix_caching)
        if why:
            raise TraceError(f"kv_cache_groups are not simulated with {why}; leave out one of the two")
        if self.offloading is not None and (why := why_not_offloaded(self)):
            raise TraceError(f"an offload of KV blocks is not simulated with {why}; leave out one of the two")
        drafts = 0 if self.speculation is None else self.speculation.num_speculative_tokens
        if self.max_num_seqs * (1 + drafts) > MOST_SEQUENCES:
            raise TraceError(
                f"max_num_seqs ({self.max_num_seqs}) requests of {1 + drafts} tokens per step: at most "
                f"{MOST_SEQUENCES} tokens can be simulated; lower max_num_seqs"
            )
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise TraceError(
                f"max_num_active_seqs ({self.max_num_active_seqs}) is above max_num_seqs ({self.max_num_seqs}); "
                "lower it or leave it out"
            )
        if not 0 <= self.watermark < 1:
            raise TraceError(f"watermark is {self.watermark}; it is a share of the blocks, at least 0 and below 1")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise TraceError(f"scheduling_policy is {self.scheduling_policy!r}; use fcfs or priority")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise TraceError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); vLLM refuses that too"
            )


# Arguments that only some releases have, and how a value is read.
RELEASE_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "scheduler_reserve_full_isl": bool,
    "watermark": float,
    "long_prefill_token_threshold_adaptive": bool,
    "max_num_active_seqs": int,
    "max_num_scheduled_tokens": int,
    "prefill_schedule_interval": int,
    "prefix_cache_retention_interval": int,
}


def release_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`EngineConfig` that depend on the vLLM release: its behaviours and extra arguments.

    ``given``: engine arguments by name; without ``vllm_version`` the engine schedules like 0.12.  Raises
    ``TraceError`` for a value that is not a number.
    """
    version = given.get("vllm_version")
    pack = None if version is None else choose_pack(str(version)).pack
    arguments = {} if pack is None else {n: pack.value_of(n) for n in pack.arguments if n in RELEASE_ARGUMENTS}
    for name, read in RELEASE_ARGUMENTS.items():
        if given.get(name) is not None:
            try:
                arguments[name] = read(given[name])
            except (TypeError, ValueError):
                raise TraceError(f"{name} is {given[name]!r}, and not a number; correct it, or leave it out") from None
    return arguments | {"behaviours": Behaviours(**dict.fromkeys(pack.behaviours if pack else (), True))}


def _refuse(bad: Bools, problem: str, remedy: str, offset: int = 0) -> None:
    if bad.any():
        raise TraceError(f"request {int(np.argmax(bad)) + offset}: {problem}; {remedy}")
