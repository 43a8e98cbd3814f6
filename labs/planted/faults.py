"""Faults to plant: in a server, in its stated arguments, in the instruments that record it, in a simulator.

::

    case = planted_case(FAULTS[0])           # what a user would have in his hands
    case.recording, case.release, case.replay

A ``Fault`` is one or more ``Cause``; ``fault_list`` has those of the scoreboard.  The real server is the embedded
engine, so that nothing is wrong but what was planted; or a real vLLM, in a recording that ships
(``planted_in``), which no simulator meets exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.recording import (
    ITERATION_SCHEMA,
    JOURNEY_EVENT_SCHEMA,
    LIFECYCLE_SCHEMA,
    SNAPSHOT_SCHEMA,
    STEP_SCHEMA,
    Recording,
    Setting,
    SharedPrefix,
    Stage,
)
from blis_replay.ingest.rows import no_rows, rows_of
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.frames import prompt_identities, recording_of
from blis_replay_labs.planted.generate import generate

Value = int | bool | str | None
# What was recorded: journeys and every step; a tenth of the steps; only what the client saw.
Depth = Literal["full", "steps", "client"]
# What is blamed where no error of a mean is as large as one worth a name; a right answer where a fault changes nothing.
NOTHING = "nothing"
# The error that a replay cannot be had, in the words of vLLM; a right answer for arguments that vLLM refuses.
REFUSED = "refused"

# Some 720 blocks are in use at most, 1,050 were no prompt found in the cache.
_KV_BLOCKS = 1_301
# 600 requests, up to 35 of them running at once.
PLANTED = SyntheticExperiment(
    slug="20260301-120000-planted-1b-tp1-general",
    model="synthetic/planted-1b",
    stages=(Stage(0, 4.0, 40_000_000), Stage(1, 11.0, 40_000_000)),
    shared_prefix=SharedPrefix(
        num_groups=6, num_prompts_per_group=5, system_prompt_tokens=160, question_tokens=240, output_tokens=160
    ),
    latency=LatencyModel("blackbox", intercept_ns=8_000_000, per_prefill_token_ns=30_000, per_decode_token_ns=150_000),
    lifecycle=Lifecycle(pre_queue_us=5_000, post_token_us=150, post_request_us=400),
    engine=EngineConfig(
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        async_scheduling=True,
        num_gpu_blocks=_KV_BLOCKS,
    ),
    cache="simulated",
    journeys=True,
    step_sample_rate=1.0,
)
_TWO_LEVELS = replace(
    PLANTED,
    stages=(Stage(0, 6.0, 20_000_000), Stage(1, 12.0, 20_000_000)),
    shared_prefix=SharedPrefix(
        num_groups=6, num_prompts_per_group=5, system_prompt_tokens=160, question_tokens=240, output_tokens=80
    ),
)
LOADS: dict[str, SyntheticExperiment] = {
    "two levels": _TWO_LEVELS,
    "other lengths": replace(
        _TWO_LEVELS,
        ignore_eos=False,
        shared_prefix=replace(_TWO_LEVELS.shared_prefix, output_tokens=160),
    ),
    "long prompts": replace(
        _TWO_LEVELS,
        stages=(Stage(0, 3.0, 30_000_000), Stage(1, 6.0, 30_000_000)),
        shared_prefix=SharedPrefix(
            num_groups=20, num_prompts_per_group=20, system_prompt_tokens=64, question_tokens=1_100, output_tokens=60
        ),
        prompt_jitter_tokens=500,
    ),
    "bursts": replace(
        _TWO_LEVELS,
        stages=tuple(Stage(i, rate, 3_000_000) for i, rate in enumerate((4.0, 30.0) * 5)),
        stage_gap_us=0,
    ),
    "crowds": replace(
        _TWO_LEVELS,
        stages=tuple(Stage(i, rate, 2_000_000) for i, rate in enumerate((1.0, 12.0) * 8)),
        stage_gap_us=0,
        shared_prefix=SharedPrefix(
            num_groups=40, num_prompts_per_group=10, system_prompt_tokens=64, question_tokens=1_100, output_tokens=60
        ),
        prompt_jitter_tokens=500,
    ),
    "tiny": replace(_TWO_LEVELS, stages=(Stage(0, 2.0, 12_000_000),)),
    "very long prompts": replace(
        _TWO_LEVELS,
        stages=(Stage(0, 0.5, 60_000_000), Stage(1, 1.0, 60_000_000)),
        shared_prefix=SharedPrefix(
            num_groups=10, num_prompts_per_group=12, system_prompt_tokens=512, question_tokens=7_000, output_tokens=40
        ),
        prompt_jitter_tokens=400,
        engine=replace(_TWO_LEVELS.engine, max_model_len=16_384, num_gpu_blocks=8_001),
    ),
    "equal lengths": replace(
        _TWO_LEVELS,
        shared_prefix=replace(_TWO_LEVELS.shared_prefix, num_groups=600, num_prompts_per_group=1),
        prompt_jitter_tokens=0,
    ),
    **{
        f"{tokens} tokens": replace(
            _TWO_LEVELS, shared_prefix=replace(_TWO_LEVELS.shared_prefix, output_tokens=tokens, question_tokens=900)
        )
        for tokens in (1, 3)
    },
    "a long pause": replace(_TWO_LEVELS, stage_gap_us=60_000_000),
    "one at a time": replace(
        _TWO_LEVELS,
        stages=(Stage(0, 0.5, 240_000_000),),
        shared_prefix=replace(_TWO_LEVELS.shared_prefix, output_tokens=20),
    ),
}


def _as_it_is(spec: SyntheticExperiment) -> SyntheticExperiment:
    return spec


@dataclass(frozen=True)
class WrongSimulator:
    """What a simulator with planted causes is given; ``replay``: the mode, as ``parse_mode`` reads it."""

    recording: Recording
    release: CoefficientRelease
    replay: str = "exact"


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    ``name``, ``size``: in words.  ``blamed``: components that are rightly blamed for it.  ``checks``: instrument
    checks that may find it.  ``server``: what the real server is, other than the load says; ``stated``: what the
    recording says of its engine (None: nothing).  ``instruments``: what they make of the recording.  ``simulator``:
    what is wrong with that.  ``files``: what is wrong in a copy of the folder of a real recording.
    """

    name: str
    size: str
    blamed: tuple[str, ...]
    checks: tuple[str, ...] = ()
    server: Callable[[SyntheticExperiment], SyntheticExperiment] = _as_it_is
    stated: Mapping[str, Value] = field(default_factory=dict)
    instruments: Callable[[Recorded], Recorded] | None = None
    simulator: Callable[[WrongSimulator], WrongSimulator] | None = None
    files: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Fault:
    """What is planted at once in a load of ``LOADS``, recorded to a ``depth``.

    ``load``: or a recording of ``live_faults.read_live``.  ``decidable``: whether the recording has what tells the
    cause from others that would look the same.
    """

    group: str
    causes: tuple[Cause, ...]
    depth: Depth = "full"
    load: str = "two levels"
    decidable: bool = True

    @property
    def is_live(self) -> bool:
        """Whether it is planted in the recording of a real server."""
        return self.load not in LOADS

    @property
    def in_files(self) -> bool:
        """Whether something is wrong in the files that were recorded."""
        return any(cause.files for cause in self.causes)

    @property
    def name(self) -> str:
        """The causes, in words."""
        return " and ".join(cause.name for cause in self.causes)

    @property
    def size(self) -> str:
        """The sizes, in words."""
        return "; ".join(cause.size for cause in self.causes)


@dataclass(frozen=True)
class Recorded:
    """A recording on its way through the instruments.

    ``truth``: None of a real server.  ``request``: int64[n], which request of the truth each one is.  ``stamped``:
    whether the stamps of tokens are the true ones.
    """

    recording: Recording
    truth: SyntheticTruth | None
    request: Int64s
    stamped: bool = True


@dataclass(frozen=True)
class Case:
    """What a user has in his hands, and the truth.

    ``token_gaps``: as recorded, None where tokens were not stamped; ``true_us``: true means by metric.
    """

    recording: Recording
    release: CoefficientRelease
    replay: str
    token_gaps: tuple[Int64s, Int64s] | None
    true_us: Mapping[str, float]


def planted_case(fault: Fault, seed: int = 3) -> Case:
    """Serve and record the load with all causes of the fault in place; without causes all is as it should be."""
    spec = replace(LOADS[fault.load], seed=seed, step_sample_rate=0.1 if fault.depth == "steps" else 1.0)
    for cause in fault.causes:
        spec = cause.server(spec)
    truth = generate(spec)
    recording = replace(recording_of(truth), prefix=prompt_identities(truth))
    recorded = _recorded(fault, Recorded(recording, truth, np.arange(len(truth))))
    times = np.bincount(recorded.request, minlength=len(truth)) > 0
    gaps = truth.result.inter_token_gaps(truth.ok & times) if recorded.stamped else None
    return _given(fault, recorded, true_release(truth), gaps, mean_latencies(recording_of(truth)))


def true_release(truth: SyntheticTruth) -> CoefficientRelease:
    """The coefficients that the server of an experiment followed."""
    spec = truth.spec
    return CoefficientRelease(
        name="planted-truth",
        status="valid",
        summary="the coefficients that the synthetic server follows",
        source="planted",
        hardware=spec.hardware,
        sha256="planted",
        models=(ModelEntry(spec.model, spec.tensor_parallelism, spec.latency, spec.lifecycle),),
        fitted_on=(),
        published_errors={},
    )


def planted_in(fault: Fault, recording: Recording, release: CoefficientRelease, sound: Recording | None = None) -> Case:
    """The same in the recording of a real server, with coefficients that meet it as well as any do.

    ``sound``: the recording before its files were changed.

    The server of a recording cannot be changed any more: it has the cause already, and only what is stated changes.
    """
    as_it_is = replace(recording, token_events=None)
    recorded = _recorded(fault, Recorded(as_it_is, None, np.arange(recording.requests.height)))
    return _given(fault, recorded, release, None, mean_latencies(sound or recording))


def _recorded(fault: Fault, recorded: Recorded) -> Recorded:
    recorded = replace(
        recorded, recording=replace(recorded.recording, engine=_stated_engine(recorded.recording, fault))
    )
    for cause in fault.causes:
        recorded = recorded if cause.instruments is None else cause.instruments(recorded)
    return recorded


def _given(
    fault: Fault,
    recorded: Recorded,
    release: CoefficientRelease,
    gaps: tuple[Int64s, Int64s] | None,
    true_us: Mapping[str, float],
) -> Case:
    simulator = WrongSimulator(to_depth(recorded.recording, fault.depth), release)
    for cause in fault.causes:
        simulator = simulator if cause.simulator is None else cause.simulator(simulator)
    return Case(simulator.recording, simulator.release, simulator.replay, gaps, true_us)


def mean_latencies(recording: Recording) -> dict[str, float]:
    """Means of a recording, us, by metric; of ITL that over all gaps."""
    rows = recording.requests.frame(["ttft_us", "e2e_us", "output_tokens", "status"]).filter(pl.col("status") == "ok")
    ttft_us, e2e_us, tokens = (rows[name].to_numpy() for name in rows.columns[:3])
    itl_us = (e2e_us - ttft_us).sum() / max(int((tokens - 1).sum()), 1)
    return {"e2e": float(e2e_us.mean()), "ttft": float(ttft_us.mean()), "itl": float(itl_us)}


def _stated_engine(recording: Recording, fault: Fault) -> dict[str, Setting]:
    """The engine arguments as the recording has them: true, but for what the causes say."""
    engine = dict(recording.engine)
    for name, value in (pair for cause in fault.causes for pair in cause.stated.items()):
        engine.pop(name, None)
        if value is not None:
            engine[name] = Setting(value, "file", "as it was noted")
    return engine


def to_depth(recording: Recording, depth: Depth) -> Recording:
    """The recording without what a less complete instrumentation lacks."""
    if depth == "full":
        return recording
    of_server = [pl.lit(None, pl.Int64).alias(name) for name in ("queue_us", "prefill_us", "decode_us")]
    less = replace(
        recording,
        requests=rows_of(recording.requests.frame().with_columns(of_server)),
        lifecycles=no_rows(LIFECYCLE_SCHEMA),
        journey_events=no_rows(JOURNEY_EVENT_SCHEMA),
    )
    if depth == "steps":
        return less
    uncounted = pl.lit(None, pl.Int64).alias("cached_prompt_tokens")
    requests = rows_of(less.requests.frame().with_columns(uncounted))
    less = replace(less, requests=requests, snapshots=no_rows(SNAPSHOT_SCHEMA), recorder=None)
    of_client = recording.aggregates.filter(~pl.col("metric").str.starts_with("server_"))
    less = replace(less, iterations=no_rows(ITERATION_SCHEMA), aggregates=of_client)
    clocks = tuple(clock for clock in recording.clocks if clock.name == "client")
    return replace(less, steps=no_rows(STEP_SCHEMA), clocks=clocks)


def taken(recorded: Recorded, chosen: Int64s) -> Recorded:
    """The requests ``chosen`` (places, ascending; one twice is recorded twice); the server's records stay whole."""
    recording = recorded.recording
    number = pl.DataFrame({"request_index": chosen, "now": np.arange(len(chosen))})
    first = number.unique("request_index", keep="first")

    def renumbered(frame: pl.DataFrame, by: pl.DataFrame, how: Literal["left", "inner"]) -> pl.DataFrame:
        joined = frame.join(by, on="request_index", how=how, maintain_order="left")
        return joined.with_columns(request_index=pl.col("now")).drop("now").select(frame.columns)

    requests = recording.requests.frame()[chosen].with_columns(request_index=pl.int_range(len(chosen)))
    prefix = recording.prefix
    if prefix is not None:
        of_requests = renumbered(prefix.requests, number, "inner").sort("request_index")
        prefix = replace(prefix, requests=of_requests)
    lifecycles = rows_of(renumbered(recording.lifecycles.frame(), first, "left"))
    changed = replace(recording, requests=rows_of(requests), lifecycles=lifecycles, prefix=prefix)
    return replace(recorded, recording=changed, request=recorded.request[chosen])


def with_requests(recorded: Recorded, *columns: pl.Expr) -> Recorded:
    """The recording with these columns of its requests."""
    requests = recorded.recording.requests.frame().with_columns(columns)
    return replace(recorded, recording=replace(recorded.recording, requests=rows_of(requests)))


def with_steps(recorded: Recorded, *columns: pl.Expr) -> Recorded:
    """The recording with these columns of its step records."""
    steps = recorded.recording.steps.frame().with_columns(columns)
    return replace(recorded, recording=replace(recorded.recording, steps=rows_of(steps)))


def drawn(n: int, share: float, seed: int = 1) -> Bools:
    """bool[n]: exactly this share, at random; never the first."""
    random = np.random.Generator(np.random.PCG64(seed))
    chosen = np.zeros(n, np.bool_)
    chosen[1 + random.permutation(n - 1)[: round(share * n)]] = True
    return chosen
