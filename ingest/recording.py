"""What a recording is once it has been read: the form that every reader fills in.

A reader turns one kind of file into one of the frames below and never guesses: what a file does not say stays null.
``assemble.read_recording`` joins them into a :class:`Recording`, the checks add findings, the store keeps it.  Times
are int64 us from the experiment's own zero, the send time of its first request; ``clocks`` has those they were read
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from blis_replay.ingest.rows import FEW_ROWS, Rows, no_rows, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# One row per request, in send order (``request_index`` 0, 1, ...).
REQUEST_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,
    "request_id": pl.String,  # the recording's own name for it
    "stage": pl.Int64,  # load stage, null if unknown
    "arrival_us": pl.Int64,  # client send, or arrival at the server's front end
    "prompt_tokens": pl.Int64,  # null where the recording lost it (failed requests)
    "output_tokens": pl.Int64,  # the true decode length, null if not known
    "output_tokens_source": pl.String,  # one of OUTPUT_LENGTH_SOURCES
    "output_tokens_reported": pl.Int64,  # as the recording has it, trusted or not
    "max_tokens": pl.Int64,
    "ttft_us": pl.Int64,
    "e2e_us": pl.Int64,  # of a failed request: how long the client held on
    "queue_us": pl.Int64,  # server: queued to first scheduled
    "prefill_us": pl.Int64,  # server: first scheduled to first token
    "decode_us": pl.Int64,  # server: first token to last token
    "cached_prompt_tokens": pl.Int64,  # prefix-cache hit where the server reported it
    "status": pl.String,  # one of STATUSES; aborted: the client ended the run, or gave up as configured
    "error": pl.String,
}

STATUSES = ("ok", "error", "timeout", "aborted")

# Where a decode length comes from, best first (re-tokenised replies of Llama-2-7B have 20-26 % fewer tokens).
COUNTED, RETOKENISED = "counted stream events", "re-tokenised"
OUTPUT_LENGTH_SOURCES = (
    "server usage",
    "max_tokens with ignore_eos",
    "configured with ignore_eos",
    COUNTED,
    RETOKENISED,
)

# One row per sampled engine step.
STEP_SCHEMA: dict[str, type[pl.DataType]] = {
    "step_id": pl.Int64,
    "start_us": pl.Int64,  # start of schedule(), on the step clock, from the experiment's zero
    "duration_us": pl.Int64,  # CPU time inside schedule(); not the step cycle
    "running_depth": pl.Int64,
    "waiting_depth": pl.Int64,
    "prefill_requests": pl.Int64,
    "decode_requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "preempted_requests": pl.Int64,
    "kv_usage": pl.Float64,
    "kv_blocks_total": pl.Int64,
    "kv_blocks_free": pl.Int64,
}

# One row per step as the server's log has it (``--enable-logging-iteration-details``), by engine and index.
# A request is in prefill until it has an output token, so that one which computes its tokens again is in decode.
ITERATION_SCHEMA: dict[str, type[pl.DataType]] = {
    "engine": pl.Int64,  # data-parallel rank
    "iteration": pl.Int64,  # counts from 0 within one start of the server
    "prefill_requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_requests": pl.Int64,
    "decode_tokens": pl.Int64,
    "elapsed_us": pl.Int64,  # waiting for the model's result: not the cycle, and asynchronously not the step
    "kv_usage": pl.Float64,  # 0..1 to a thousandth, after the step
    "dummy": pl.Boolean,  # a step without requests, in which an engine only kept pace with the others
    "logged_us": pl.Int64,  # whole second of its stamp, from that of the first iteration
    "start_us": pl.Int64,  # start of schedule(), from the experiment's zero, worked out from requests; null: not placed
    "uncertainty_us": pl.Int64,  # how far the true start can be from it
}

# Which prompts begin alike, one row a distinct prompt.
PROMPT_SCHEMA: dict[str, type[pl.DataType]] = {
    "prompt": pl.Int64,  # 0, 1, ...
    "parent": pl.Int64,  # an earlier prompt with which it begins, or null
    "shared_tokens": pl.Int64,  # how far the two are equal
    "tokens": pl.Int64,  # how far requests with this prompt are equal; beyond, they are like no other
}
REQUEST_PROMPT_SCHEMA: dict[str, type[pl.DataType]] = {"request_index": pl.Int64, "prompt": pl.Int64}

# One row per running request in a step that was recorded in full.
SNAPSHOT_SCHEMA: dict[str, type[pl.DataType]] = {
    "step_id": pl.Int64,
    "request_id": pl.String,  # the engine's own (LIFECYCLE_SCHEMA core_request_id)
    "prompt_tokens": pl.Int64,
    "effective_prompt_tokens": pl.Int64,  # without those that its first admission found in the prefix cache
    "computed_tokens": pl.Int64,  # before this step's
    "output_tokens": pl.Int64,
    "scheduled_tokens": pl.Int64,  # in this step
}

# One row per request that the server traced (a journey), in order of arrival.  Null: not recorded.
LIFECYCLE_SCHEMA: dict[str, type[pl.DataType]] = {
    "journey": pl.Int64,  # 0, 1, ...
    "request_index": pl.Int64,  # the request it belongs to, null if identities do not tell
    "api_request_id": pl.String,
    "core_request_id": pl.String,
    "arrived_us": pl.Int64,  # at the API server, prompt tokenised
    "queued_us": pl.Int64,
    "scheduled_us": pl.Int64,  # first
    "first_token_us": pl.Int64,  # when the scheduler had it
    "first_response_us": pl.Int64,  # when the API server had it
    "finished_us": pl.Int64,
    "departed_us": pl.Int64,  # answer sent, or given up by the client
    "queued_step": pl.Int64,  # last step begun before
    "scheduled_step": pl.Int64,
    "first_token_step": pl.Int64,  # the step that computed it
    "finished_step": pl.Int64,
    "preemptions": pl.Int64,
    "status": pl.String,  # ok | aborted | error | unfinished
    "prompt_tokens": pl.Int64,
    "max_tokens": pl.Int64,
    "output_tokens": pl.Int64,  # produced, also by an aborted one
    "cached_prompt_tokens": pl.Int64,  # prefix-cache hit of the first admission
}

ARRIVAL_TIME = "request.arrival_time"  # of the engine's request, as the recorder in a server notes it

# One row per event of a journey, by journey and time.
JOURNEY_EVENT_SCHEMA: dict[str, type[pl.DataType]] = {
    "journey": pl.Int64,
    "event": pl.String,  # as recorded: api.ARRIVED, journey.QUEUED, ...
    "time_us": pl.Int64,
    "step_id": pl.Int64,
    "output_tokens": pl.Int64,
    "finish_status": pl.String,  # stopped | length | aborted | ignored | error
}

# Published aggregates: one row per number.
AGGREGATE_SCHEMA: dict[str, type[pl.DataType]] = {
    "stage": pl.Int64,  # -1: the whole run
    # e2e | ttft | itl_reported | tpot_reported | prompt_tokens | output_tokens_reported, all over successes; TPOT is
    # (last token - first token) / (n - 1); tools that mean something else by it have tpot_with_ttft_reported, (last
    # token - send) / n, or tpot_over_n_reported, (last token - first token) / n; requests: the counts of the report,
    # statistics "sent", "succeeded", "failed"; schedule_delay: from when the client meant to send to when it did;
    # server_...: what the server itself counted and timed (/metrics), statistics "count", "mean", "sum" and those
    "metric": pl.String,
    "statistic": pl.String,  # mean, min, p0.1, p1, p5, p10, p25, p50, p75, p90, p95, p99, p99.9, max
    "value": pl.Float64,  # us for latencies, tokens for lengths
}


SCHEDULE_DELAY = "schedule_delay"

# Source of an engine argument whose value is an assumption.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Setting:
    """One engine argument and where it came from.

    ``source``: ``recorded`` (a file of the recording), ``derived`` (from what was recorded), ``profile`` (bundled
    profile of the slug), ``file`` (``--engine FILE``), ``default`` (not given, the default of this version on this
    device), or ``unknown``.  Of the last the value is an assumption.
    """

    value: int | float | bool | str
    source: str
    detail: str = ""  # the file and field, or the reason

    @property
    def said(self) -> bool:
        """Whether somebody said it, or the run showed it."""
        return self.source not in ("default", UNKNOWN)


@dataclass(frozen=True)
class Stage:
    """A load stage: its number, requested rate (requests/s) and duration (us)."""

    stage: int
    rate_per_s: float
    duration_us: int


@dataclass(frozen=True)
class SharedPrefix:
    """A shared-prefix workload: groups of prompts that begin with one system prompt.

    In a :class:`Recording` as the load generator ran it, in a :class:`LoadProfile` as it was asked for.
    """

    num_groups: int
    num_prompts_per_group: int
    system_prompt_tokens: int
    question_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoadProfile:
    """The load as it was declared, which is not always what ran.

    ``source``: the file.  ``arrivals``: the load generator's word (``constant``, ``poisson``).  ``stage_gap_us``: the
    pause after a stage.  ``multi_turn``: each prompt of ``shared_prefix`` is a user who goes on with one conversation.
    """

    source: str
    arrivals: str | None
    stages: tuple[Stage, ...]
    stage_gap_us: int
    shared_prefix: SharedPrefix | None
    multi_turn: bool


# The source of identities that the engine itself worked with.
SERVER_BLOCKS = "the server's own hashes of prompt blocks"


@dataclass(frozen=True)
class PromptTree:
    """Identities of prompts: what two requests share follows from the tree of their prompts.

    Two prompts share what both share with the prompt at which their ways up the tree meet.  ``source``: in words, where
    the identities come from and how sure they are.  ``prompts``: ``PROMPT_SCHEMA``, each after its parent.
    ``requests``: ``REQUEST_PROMPT_SCHEMA`` in send order; the prompt of a request without a row is not known.
    """

    source: str
    prompts: pl.DataFrame
    requests: pl.DataFrame


@dataclass(frozen=True)
class Clock:
    """A clock of the recording: the value it showed at the experiment's zero, in us.

    ``constructed``: whoever published the file made the stamps up, so they do not place other clocks.  ``placed``: how
    ``zero_us`` was found, one of the placements below; of the requests' own clock empty, REBUILT or REBUILT_E2E.
    ``uncertainty_us``: of an estimate, half its interval.  ``stamped_zero_us``: what the stamps say, believed or not.
    """

    name: str  # client | server | step
    kind: str  # epoch | monotonic | relative
    zero_us: int
    constructed: bool = False
    placed: str = ""
    uncertainty_us: int | None = None
    stamped_zero_us: int | None = None


# How a clock was laid beside that of the requests: by events that carry both, because both are one
# clock of one host, by matching running depth with requests in flight, or not at all.
BRIDGED, ONE_CLOCK, ESTIMATED, NOT_KNOWN = "bridged by pairs", "one clock", "estimated from depth", "not known"
IDENTITIES = "bridged by identities"  # requests that client and server both recorded bound it from both sides
# Of the requests' clock: send times that were not recorded, and follow from a client that held a number in flight.
REBUILT = "rebuilt from requests in flight, in file order"
REBUILT_E2E = f"{REBUILT}; the E2E of each from its TTFT and the mean TPOT"


@dataclass(frozen=True)
class TokenEvents:
    """Stream events as the client stamped them (before any correction), in a flat file of int64, never all in memory.

    Request ``i`` (its ``request_index``) owns ``counts[i]`` stamps from ``offsets[i]``, in us on the client's clock,
    which shows ``zero_us`` at the experiment's zero.
    """

    path: Path
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    zero_us: int


# Begins the reason of a rejection where a file ends too early, or cannot be read on from there.
CUT_OFF = "the rest of the file is lost: "


@dataclass(frozen=True)
class SourceFile:
    """A file that was read: its path inside the recording, size in bytes and SHA-256.

    ``rejected``: records of it that could not be used, as ``(place, reason)``; the
    first 20 are kept, ``rejected_count`` has them all.
    """

    name: str
    kind: str
    bytes: int
    sha256: str
    records: int = 0
    rejected_count: int = 0
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def is_cut_off(self) -> bool:
        """Whether it ends too early: what followed, if anything did, is not known."""
        return any(reason.startswith(CUT_OFF) for _place, reason in self.rejected)

    def loss(self) -> str:
        """How many of its records were rejected, and the first of them with its reason; empty if none was."""
        if not self.rejected_count:
            return ""
        first = "".join(f", the first at {place}: {reason}" for place, reason in self.rejected[:1])
        return f"{self.name}: {self.rejected_count} of {self.records + self.rejected_count} records rejected{first}"


Severity = Literal["note", "corrected", "unusable"]
# What a finding can strike besides one metric: times that the client stamped on a way longer than usual, and first
# events that are not first tokens.
WAY, FIRST_TOKEN = "way to the client", "first token"
NOT_CHECKED = "nothing to check"  # threshold of a finding that says what a check lacks


@dataclass(frozen=True)
class Finding:
    """What an instrument check found.

    ``severity``: ``note`` (worth knowing), ``corrected`` (a number was changed; both are in ``measured``), ``unusable``
    (the metric must not be used).  ``metric``: the metric it touches (``itl``, ``e2e``, ..., ``""`` for the recording
    as a whole).  ``message``: one sentence with the numbers.  ``threshold``: the rule and why.
    """

    check: str
    severity: Severity
    metric: str
    message: str
    measured: dict[str, float | int | str | None] = field(default_factory=dict)
    threshold: str = ""

    @property
    def is_checked(self) -> bool:
        """Whether the check had something to look at."""
        return self.threshold != NOT_CHECKED


# The check whose findings are those of the readers: which sources of an engine argument disagree.
ENGINE_CHECK = "engine_arguments"

# What there is to compare a replay with.
GroundTruth = Literal["recorded", "published aggregates", "arrival trace"]
RECORDED: GroundTruth = "recorded"
PUBLISHED: GroundTruth = "published aggregates"
ARRIVALS: GroundTruth = "arrival trace"


@dataclass(frozen=True)
class Recording:
    """One experiment as recorded, as published in aggregates, or (an arrival trace) without latencies.

    ``model`` is null where no file names one.
    """

    slug: str
    alias: str
    workload: str
    model: str | None
    hardware: str | None
    tensor_parallelism: int | None
    ground_truth: GroundTruth
    content_hash: str
    engine: dict[str, Setting]  # max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_gpu_blocks, ...
    stages: tuple[Stage, ...]
    shared_prefix: SharedPrefix | None
    ignore_eos: bool | None
    prefix_hit_rate: float | None  # 0..1, of an aggregate such as the server log; not per request
    requests: Rows  # REQUEST_SCHEMA, in send order
    token_events: TokenEvents | None  # its file lives as long as read_recording's context
    steps: Rows  # STEP_SCHEMA
    aggregates: pl.DataFrame  # AGGREGATE_SCHEMA
    clocks: tuple[Clock, ...]
    files: tuple[SourceFile, ...]
    missing: tuple[str, ...]  # what the recording does not have, in words
    dropped_step_events: int = 0  # events of step spans that the tracing SDK discarded
    findings: tuple[Finding, ...] = ()
    prefix: PromptTree | None = None
    snapshots: Rows = field(default_factory=lambda: no_rows(SNAPSHOT_SCHEMA))  # by step and request
    load_profile: LoadProfile | None = None
    recorder: dict[str, float | int | str | None] | None = None  # what a step log says of itself; not stored
    lifecycles: Rows = field(default_factory=lambda: no_rows(LIFECYCLE_SCHEMA))
    journey_events: Rows = field(default_factory=lambda: no_rows(JOURNEY_EVENT_SCHEMA))  # by journey and time
    iterations: Rows = field(default_factory=lambda: no_rows(ITERATION_SCHEMA))  # by engine and index

    @property
    def served_dtype(self) -> str | None:
        """The data type of the weights that were served, None if it is not recorded."""
        setting = self.engine.get("dtype")
        return None if setting is None else str(setting.value)

    def in_memory(self) -> Recording:
        """The same with the rows of every table that has few held, for who looks at them over and over."""
        tables = {name: rows for name, rows in vars(self).items() if isinstance(rows, Rows) and rows.held is None}
        few: dict[str, Any] = {name: rows_of(rows.frame()) for name, rows in tables.items() if rows.height <= FEW_ROWS}
        return replace(self, **few)

    @property
    def is_summed_up(self) -> bool:
        """Whether aggregates say what clients saw, and not only what the server counted itself."""
        metric = self.aggregates["metric"]
        return not (metric.str.starts_with("server_") | (metric == SCHEDULE_DELAY)).all()


def empty_frame(schema: Mapping[str, type[pl.DataType] | pl.DataType]) -> pl.DataFrame:
    """A frame of the given schema without rows."""
    return pl.DataFrame(schema=schema)
