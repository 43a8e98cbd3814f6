"""What a recording is once it has been read: the form that every reader fills in.

A reader turns one kind of file into one of the frames below and never guesses: what a file does not say stays null.
``assemble.read_recording`` joins them into a :class:`Recording`, the checks add findings, the store keeps it.  Times
are int64 us from the experiment's own zero, the send time of its first request; ``clocks`` has those they were read
from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from blis_replay.ingest.rows import FEW_ROWS, Rows, no_rows, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Columns of every table, with what each means.
SCHEMA_SQL = Path(__file__).with_name("schema.sql").read_text("utf-8")
_TYPES: dict[str, type[pl.DataType]] = {
    "BIGINT": pl.Int64,
    "DOUBLE": pl.Float64,
    "VARCHAR": pl.String,
    "BOOLEAN": pl.Boolean,
}
_OWNER = "slug"  # says whose a row of the store is


@cache
def columns_of(table: str) -> dict[str, type[pl.DataType]]:
    """Columns and types of a table of ``schema.sql``, without the one that says whose its rows are."""
    plain = re.sub("--.*", "", SCHEMA_SQL)
    created = plain.partition(f"CREATE TABLE IF NOT EXISTS {table} (")[2].partition(");")[0]
    columns = re.findall(rf"(\w+) ({'|'.join(_TYPES)})\b", created)
    return {name: _TYPES[kind] for name, kind in columns if name != _OWNER}


REQUEST_SCHEMA = columns_of("requests")
STEP_SCHEMA = columns_of("steps")
ITERATION_SCHEMA = columns_of("iterations")
PROMPT_SCHEMA = columns_of("prompts")
REQUEST_PROMPT_SCHEMA = columns_of("request_prompts")
SNAPSHOT_SCHEMA = columns_of("snapshots")
LIFECYCLE_SCHEMA = columns_of("lifecycles")
JOURNEY_EVENT_SCHEMA = columns_of("journey_events")
AGGREGATE_SCHEMA = columns_of("aggregates")

# Where a decode length comes from, best first (re-tokenised replies of Llama-2-7B have 20-26 % fewer tokens).
COUNTED, RETOKENISED = "counted stream events", "re-tokenised"
OUTPUT_LENGTH_SOURCES = (
    "server usage",
    "max_tokens with ignore_eos",
    "configured with ignore_eos",
    COUNTED,
    RETOKENISED,
)

ARRIVAL_TIME = "request.arrival_time"  # of the engine's request, as the recorder in a server notes it
SCHEDULE_DELAY = "schedule_delay"
ENDED = "ended"  # statistic of requests: how many ended in a window that a server counted, whenever they were sent

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

    Request ``i`` (its ``request_index``; in a reader its place in the file) owns ``counts[i]`` stamps from
    ``offsets[i]``, in us on the client's clock, which shows ``zero_us`` at the experiment's zero.
    """

    path: Path
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    zero_us: int = 0  # not known to a reader


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
# What a finding can strike besides one metric: times that the client stamped on a way longer than usual, first events
# that are not first tokens, and all stamps of a client that is late for every token.
WAY, FIRST_TOKEN, STAMPS = "way to the client", "first token", "stamps of the client"
BY_CLIENT = "--by client makes an experiment of each"  # of several loads of one server in a folder
# Where the loads came at one time, or nothing says when.
ONE_TABLE = "put the requests of one run into one table, or ingest each file by itself if its load came alone"
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
OVERLOAD_CHECK = "overloaded"  # the check that finds only recordings that are

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

    def argument(self, name: str, absent: Any = None) -> Any:
        """The value of an engine argument; ``absent`` if nothing says it."""
        setting = self.engine.get(name)
        return absent if setting is None else setting.value

    @property
    def served_dtype(self) -> str | None:
        """The data type of the weights that were served, None if it is not recorded."""
        dtype = self.argument("dtype")
        return None if dtype is None else str(dtype)

    def clock(self, name: str) -> Clock | None:
        """The clock of that name: ``client``, ``server`` or ``step``."""
        return next((clock for clock in self.clocks if clock.name == name), None)

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
