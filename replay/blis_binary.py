"""The BLIS binary as a simulator: found, asked what it can do, run, read; and where it differs from vLLM."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReleaseError, ReplayError, printable
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.blis_files import (
    BlisResults,
    output_lengths,
    read_preemptions,
    read_results,
    shared_prefixes,
    write_trace,
)
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.program import ended, last_line, run_captured
from blis_replay.replay.simulator import Simulated, entry_of, model_of

DEFAULT_TIMEOUT_S = 600.0
_HELP_TIMEOUT_S = 30.0

# Far beyond any recording (100 days); BLIS would stop at twice the last arrival.
_HORIZON_US = 9_000_000_000_000
# Without a block count from the server, as many as the embedded engine takes at most.
_MANY_BLOCKS = 1_000_000

# The default latency model of a build.
OWN = "own"


@dataclass(frozen=True)
class BlisBuild:
    """A BLIS binary and what its ``replay --help`` names.

    ``flags``: with their dashes.  ``models``: what it says of its latency models.
    """

    path: Path
    flags: frozenset[str]
    models: str

    def flag(self, *names: str) -> str:
        """The first of these flags that the build has (newest name first), or the first of all."""
        return next((name for name in names if name in self.flags), names[0])

    def has_model(self, name: str) -> bool:
        """Whether it names this latency model."""
        return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.models) is not None


class BlisError(ReplayError):
    """The BLIS binary is missing, cannot be run, failed, hung, or answered nonsense."""


@dataclass(frozen=True)
class BlisBinary:
    """A BLIS build as a simulator.

    ``own_model``: a latency model of the build (``trained-physics``, ``roofline``), or ``OWN``, its default; then
    ``release`` only names it.  Without ``own_model`` the build runs ``release`` as its ``blackbox`` model.
    """

    build: BlisBuild
    release: CoefficientRelease
    own_model: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    name: str = "blis"
    reports_steps: bool = False

    def entry_for(self, recording: Recording) -> ModelEntry | None:
        """The release's entry, None for the build's own model; raises if the build cannot run it."""
        if self.own_model:
            if self.own_model != OWN and not self.build.has_model(self.own_model):
                there = printable(" ".join(self.build.models.split()))[:200] or "names none"
                named = f"this BLIS build has no latency model {self.own_model[:60]!r}"
                raise BlisError(f"{self.build.path}: {named}; its help: {there}")
            return None
        self.release.refuse_if_invalid()
        entry = entry_of(self.release, recording)
        _blackbox(self.build, self.release.name, entry)
        return entry

    def serve(self, plan: ReplayPlan) -> Simulated:
        """Replay the plan; raises ``ReplayError`` for whatever goes wrong with the binary."""
        recording = plan.recording
        entry = self.entry_for(recording)
        _refuse_engine(plan)
        if entry is None:
            model = _own_model_flags(recording, self.own_model)
        else:
            model = _blackbox(self.build, self.release.name, entry)
        flags = ["--model", model_of(recording).lower(), *model, *engine_flags(self.build, plan)]
        results, preemptions = self._answers(plan, flags)
        post_request_us = int(entry.lifecycle.post_request_us) if entry else 0
        return Simulated(
            completed=results.completed,
            ttft_us=results.ttft_us,
            e2e_us=results.e2e_us + post_request_us * results.completed,
            output_tokens=output_lengths(plan),
            differences=tuple(known_differences(plan, results, entry, preemptions)),
        )

    def _answers(self, plan: ReplayPlan, flags: list[str]) -> tuple[BlisResults, int | None]:
        with tempfile.TemporaryDirectory(prefix="blis-replay-") as folder:
            place = Path(folder)
            write_trace(plan, place / "trace.yaml", place / "trace.csv")
            arguments = _arguments(self.build, place, flags)
            # In its own folder, where it finds its data files; whatever it started is ended too.
            code, errors = _run(self.build.path, arguments, self.timeout_s, both=False)
            if code:
                said = f"BLIS {ended(code)}: {last_line(errors)}"
                raise BlisError(f"{self.build.path}: {said}; run it by hand, or use another build")
            results = read_results(place / "results.json", output_lengths(plan))
            return results, read_preemptions(place / "metrics.json")


def find_build(path_text: str) -> BlisBuild:
    """The build at a path (or of that name on the search path), with what its help names.

    Raises ``BlisError`` if the file is missing, cannot be run, or has no ``replay``.
    """
    found = shutil.which(path_text) if os.sep not in path_text else None
    path = Path(found or path_text).absolute()
    if not path.exists():
        raise BlisError(f"{path_text}: no such BLIS binary; give its path with --blis-binary")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise BlisError(f"{path_text}: is not an executable file; give the BLIS binary with --blis-binary")
    code, text = _run(path, ["replay", "--help"], _HELP_TIMEOUT_S, both=True)
    if code != 0:
        raise BlisError(f"{path_text}: `replay --help` {ended(code)}: {last_line(text)}; use a build that has it")
    flags = frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    if not {"--trace-header", "--trace-data"} <= flags:
        raise BlisError(
            f"{path_text}: its help names no --trace-header; use a BLIS build with `replay` (March 2026 on)"
        )
    listed = re.search(r"--latency-model(.*)", text)
    return BlisBuild(path, flags, listed[1] if listed else "")


def own_release(build: BlisBuild, model: str) -> CoefficientRelease:
    """A latency model of the build in the place of a release; its hash is the binary's."""
    with build.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    which = "that the BLIS build runs by itself" if model == OWN else f"{model} of the BLIS build"
    summary = f"The latency model {which}."
    return CoefficientRelease(f"blis-{model}-model", "valid", summary, "BLIS", "", digest)


def engine_flags(build: BlisBuild, plan: ReplayPlan) -> list[str]:
    """The engine arguments of a plan as the build calls them.

    vLLM reserves one of its blocks, BLIS none: it gets one less.  Raises ``BlisError`` for an
    argument that the build does not know.
    """
    engine = plan.engine
    blocks = _MANY_BLOCKS if engine.num_gpu_blocks is None else engine.num_gpu_blocks - 1
    horizon_us = max([_HORIZON_US, *(2 * plan.trace.arrival_us[-1:]).tolist()])
    flags: dict[str, int | str] = {
        "--total-kv-blocks": blocks,
        "--block-size-in-tokens": engine.block_size,
        build.flag("--max-num-seqs", "--max-num-running-reqs"): engine.max_num_seqs,
        build.flag("--max-num-batched-tokens", "--max-num-scheduled-tokens"): engine.max_num_batched_tokens,
        "--horizon": horizon_us,
    }
    optional: dict[str, int | str] = {
        "--max-model-len": engine.max_model_len,
        "--long-prefill-token-threshold": engine.long_prefill_token_threshold,
        "--cache-signal-delay": 0,
        "--seed": 42,
        "--log": "error",
    }
    if engine.long_prefill_token_threshold and "--long-prefill-token-threshold" not in build.flags:
        raise BlisError(f"{build.path}: this BLIS build has no --long-prefill-token-threshold; use a newer build")
    flags |= {name: value for name, value in optional.items() if name in build.flags}
    return [word for name, value in flags.items() for word in (name, str(value))]


def _run(path: Path, arguments: list[str], timeout_s: float, *, both: bool) -> tuple[int, str]:
    named = f"{path}: BLIS", "give a BLIS binary built for this machine"
    end, output = run_captured([str(path), *arguments], path.parent, timeout_s, named, BlisError, both=both)
    return end.code, output


def _arguments(build: BlisBuild, place: Path, flags: list[str]) -> list[str]:
    files = ["--trace-header", place / "trace.yaml", "--trace-data", place / "trace.csv"]
    files += ["--results-path", place / "results.json"]
    if "--metrics-path" in build.flags:
        files += ["--metrics-path", place / "metrics.json"]
    return ["replay", *map(str, files), *flags]


def _own_model_flags(recording: Recording, model: str) -> list[str]:
    tensor_parallelism = recording.tensor_parallelism
    tp = [] if tensor_parallelism is None else ["--tp", str(tensor_parallelism)]
    chosen = [] if model == OWN else ["--latency-model", model]
    return [*chosen, *(["--hardware", recording.hardware] if recording.hardware else []), *tp]


Coefficients = tuple[float, float, float]


def blackbox_coefficients(entry: ModelEntry) -> tuple[Coefficients, Coefficients]:
    """Alpha (delays) and beta (step time) of an entry: us, us per token, us per token each.

    BLIS truncates its sums to whole us, so a model that rounds half up gets half a us more: the same
    step times.  Raises ``ReleaseError`` for what three betas cannot say.
    """
    model, delays = entry.latency, entry.lifecycle
    if not isinstance(model, LatencyModel) or model.floor_ns or model.cap_ns:
        raise ReleaseError(f"{entry.model} tp {entry.tensor_parallelism} has no line for its step time")
    if model.per_context_token_ns or model.per_1000_attended_ns:
        raise ReleaseError(f"{entry.model} tp {entry.tensor_parallelism} has a cost per token of context")
    half_us = 0.5 if model.rounding == "round_half_up" else 0.0
    return (
        (delays.pre_queue_us, delays.pre_queue_per_prompt_token_us, delays.post_token_us),
        (model.intercept_ns / 1000 + half_us, model.per_prefill_token_ns / 1000, model.per_decode_token_ns / 1000),
    )


def _blackbox(build: BlisBuild, release: str, entry: ModelEntry) -> list[str]:
    """The flags of a blackbox model; ``ReleaseError`` if three betas cannot say it, or the build lacks that model."""
    try:
        alpha, beta = blackbox_coefficients(entry)
    except ReleaseError:
        raise ReleaseError(
            f"release {release} for {entry.model} is not a blackbox model (it has a context term, a floor or regimes), "
            "which no BLIS build runs; use --simulator blis-own, or --coefficients with a blackbox release"
        ) from None
    if not (build.has_model("blackbox") and {"--alpha-coeffs", "--beta-coeffs"} <= build.flags):
        raise ReleaseError(
            f"{build.path}: this BLIS build has no blackbox model and cannot run release {release}; use a build "
            "from before 2026-04-23, or --simulator blis-own"
        )
    return [
        "--latency-model",
        "blackbox",
        "--alpha-coeffs",
        ",".join(f"{value:.15g}" for value in alpha),
        "--beta-coeffs",
        ",".join(f"{value:.15g}" for value in beta),
    ]


def _refuse_engine(plan: ReplayPlan) -> None:
    engine = plan.engine
    if plan.teacher_forced:
        raise BlisError("observed times cannot be forced on BLIS; use --simulator embedded")
    if engine.scheduling_policy != "fcfs":
        raise BlisError("the server scheduled by priority, which is not passed on to BLIS; use --simulator embedded")
    if not engine.enable_chunked_prefill:
        raise BlisError("the server ran without chunked prefill, and BLIS always chunks; use --simulator embedded")


def known_differences(
    plan: ReplayPlan, results: BlisResults, entry: ModelEntry | None, preemptions: int | None
) -> Iterator[str]:
    """A sentence for each known difference that applies to this replay (blis-semantics 1.5, 2.4, 2.5, 9).

    ``preemptions``: as the build counted them, None if it does not say.
    """
    if count := overlapping_last_steps(*_last_steps(plan, results, entry), results.completed):
        yield (
            f"about {count:,} requests came while the server ran nothing but a last step; BLIS starts their step "
            "beside it, vLLM after it"
        )
    if preemptions:
        yield (
            f"BLIS preempted {preemptions:,} times; it generates the output of a preempted request again from its "
            "start, vLLM keeps what was generated"
        )
    shared, prompts, block = shared_prefixes(plan), plan.trace.prompt_tokens, plan.engine.block_size
    sharing = shared.length > 0
    if sharing.any():
        groups = len(np.unique(shared.group[sharing]))
        passed = f"prefix hits are passed to BLIS as {groups:,} groups with a shared prefix"
        yield f"{passed}, which its first request computes"
    if full := int((sharing & (prompts % block == 0) & (shared.length == prompts - block)).sum()):
        yield (
            f"{full:,} prompts could be in the cache as a whole; BLIS would compute nothing of them and hold no block, "
            "so their last block is passed as their own, as vLLM computes it"
        )
    if entry is not None and entry.lifecycle.first_token_per_decode_us:
        yield "BLIS hands a first token out at once; this release lets it wait for those of the decodes in its step"
    if entry is not None and entry.first_use is not None:
        yield "BLIS has no kernels that a new server compiles; this release has them"
    if plan.engine.async_scheduling:
        yield "BLIS has no asynchronous scheduling: it schedules a step when the one before has ended"


def overlapping_last_steps(
    queued_us: Int64s, finished_us: Int64s, last_step_us: Int64s, completed: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> int:
    """How many requests were queued while the server ran nothing but a last step.

    BLIS starts a step for those at once, beside the one that runs.  A request counts if, of
    all queued before it, some had not finished and all were in their last step.  int64[n]
    each, ``last_step_us`` about the duration of a request's last step.
    """
    order = np.argsort(queued_us, kind="stable")
    order = order[completed[order]]
    if len(order) < 2:
        return 0
    ends = np.maximum.accumulate(finished_us[order])[:-1]
    last_begin = np.maximum.accumulate(finished_us[order] - last_step_us[order])[:-1]
    queued = queued_us[order][1:]
    return int(((last_begin < queued) & (queued < ends)).sum())


def _last_steps(plan: ReplayPlan, results: BlisResults, entry: ModelEntry | None) -> tuple[Int64s, Int64s, Int64s]:
    """int64[n] us each: when requests were queued and finished, and about how long their last step took."""
    trace, lengths = plan.trace, output_lengths(plan)
    queued_us, finished_us = trace.arrival_us, trace.arrival_us + results.e2e_us
    gaps = np.maximum(lengths - 1, 1)
    last_step_us = np.where(lengths > 1, (results.e2e_us - results.ttft_us) // gaps, results.ttft_us)
    if entry is not None:
        delays = entry.lifecycle
        pre_us = delays.pre_queue_us + delays.pre_queue_per_prompt_token_us * trace.prompt_tokens
        queued_us = queued_us + pre_us.astype(np.int64)
        finished_us = finished_us - lengths * int(delays.post_token_us) - int(delays.post_request_us)
        last_step_us = last_step_us - int(delays.post_token_us)
        # A request of one token has its prefill as last step.
        last_step_us = np.where(lengths > 1, last_step_us, finished_us - queued_us)
    return queued_us, finished_us, last_step_us
