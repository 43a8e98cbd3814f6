"""Predictions of MLPerf runs: arrivals of the seed, stated lengths, a submission's own engine arguments, replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import log, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.base.document import FieldError, Text, read_yaml
from blis_replay.base.errors import ReleaseError, ReplayError
from blis_replay.blis.latency.datasheets import Architecture, config_of
from blis_replay.blis.latency.gpu_names import same_gpu
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import NEVER_US, RequestTrace
from blis_replay.ingest.readers.server.engine_arguments import checked_arguments
from blis_replay.replay.release_file import load_release, page_of_text
from blis_replay_labs.cluster.config import ClusterConfig
from blis_replay_labs.cluster.simulate import simulate_cluster
from blis_replay_labs.mlperf.loadgen import METRICS, PACED, STATISTICS, Run, schedule_us
from blis_replay_labs.silicon.operators import OperatorModel
from blis_replay_labs.silicon.tabulate import Deployment, silicon_release, system_named
from blis_replay_labs.synthetic.simulation import EngineFile, engine_of

# Sites with the same machine, software and model: their rates differ by at most this.
_SAME_RATE = 0.025
# The factor on operator times is looked for within this factor; kernels are nowhere as far off.
_MOST_FACTOR, _FACTOR_STEPS = 2.0, 8

Tokens = Annotated[float, Meta(ge=1, le=1e6)]


class Lengths(Struct, frozen=True):
    """Lengths of prompts or answers: lognormal, cut at ``most``; ``spread``: standard deviation over mean."""

    mean: Tokens
    most: Tokens
    spread: Annotated[float, Meta(ge=0, le=10)] = 0.0

    def __post_init__(self) -> None:
        if self.mean > self.most:
            raise FieldError("mean", "is above most", "correct it")

    def drawn(self, count: int, random: np.random.Generator) -> Int64s:
        """int64[count] with this mean after the cut."""
        shape, scale = np.exp(sqrt(log(1 + self.spread**2)) * random.standard_normal(count)), self.mean
        for _ in range(30):
            tokens = np.clip(np.rint(scale * shape), 1, self.most)
            scale *= self.mean / tokens.mean()
        return np.asarray(tokens, np.int64)

    def __str__(self) -> str:
        spread = f"lognormal, {self.spread:g} of the mean wide, " if self.spread else "all equal, "
        return f"{spread}mean {self.mean:g}, at most {self.most:g} tokens"


class Workload(Struct, frozen=True):
    """The lengths of a data set, and where they are from."""

    source: Text
    prompt: Lengths
    output: Lengths


class Submission(Struct, frozen=True):
    """What a submission says of its server.

    ``path``: pattern of the paths of its runs.  ``replicas``: servers behind round robin.  ``release``: coefficients
    in place of operator times, a name or a path.
    """

    path: Text
    source: Text
    model: Text
    workload: Text
    engine: Mapping[str, bool | int | float | str]
    gpu: Text | None = None
    dtype: Text | None = None
    kv_cache_dtype: Text | None = None
    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    release: Text | None = None


class Submissions(Struct, frozen=True):
    """A file of submissions, and what they share by name."""

    architectures: Mapping[str, Architecture]
    workloads: Mapping[str, Workload]
    submissions: tuple[Submission, ...]

    def __post_init__(self) -> None:
        for number, submission in enumerate(self.submissions):
            for name, known in (("model", self.architectures), ("workload", self.workloads)):
                if getattr(submission, name) not in known:
                    place = f"submissions[{number}].{name}"
                    raise FieldError(place, f"is none of {', '.join(known)}", "describe it, or correct the name")

    def of(self, run: Run) -> Submission | None:
        """The first whose pattern is that of the run."""
        return next((s for s in self.submissions if fnmatchcase(run.path, s.path)), None)


def read_submissions(path: Path) -> Submissions:
    """The submissions of a YAML file; raises ``ReplayError`` naming the field and what is wrong with it."""
    return read_yaml(page_of_text(path, "submissions"), Submissions, str(path), "submissions", ReplayError)


class NotPredictedError(ReplayError):
    """Why a run cannot be predicted."""


class Case:
    """A run and all that its simulation needs; raises ``NotPredictedError`` where some of it is not known."""

    def __init__(self, run: Run, submissions: Submissions) -> None:
        self.run = run
        if run.scenario not in PACED:
            raise NotPredictedError(f"{run.scenario}: no arrivals, and no TTFT or TPOT")
        submission = submissions.of(run)
        if _old_scheduler(run.facts.get("framework", "")):
            raise NotPredictedError("vLLM before 0.8: a scheduler that is not simulated (V0)")
        self.gpu = (submission and submission.gpu) or run.facts.get("accelerator", "")
        if self.gpu and (submission is None or submission.release is None):
            try:
                system_named(self.gpu)
            except (ReleaseError, ReplayError) as error:
                raise NotPredictedError(str(error).split(";")[0]) from None
        if submission is None:
            raise NotPredictedError("no engine arguments: no entry in the file of submissions")
        self.submission, self.architecture = submission, submissions.architectures[submission.model]
        self.workload = submissions.workloads[submission.workload]

    @cached_property
    def engine(self) -> EngineFile:
        """Its engine arguments; raises as ``read_engine``."""
        origin = Path(f"submission {self.submission.path}")
        return engine_of(checked_arguments(origin, dict(self.submission.engine)), origin)

    @cached_property
    def entry(self) -> ModelEntry:
        """Operator times of the model on the GPU, or the coefficients of the release that the submission names."""
        of = self.submission
        if of.release is not None:
            return self.engine.entry(load_release(of.release), None)
        with TemporaryDirectory(prefix="blis-replay-") as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(config_of(self.architecture)))
            parallelism = self.engine.tensor_parallelism or 1
            deployment = Deployment(config, self.gpu, parallelism, 1, of.dtype, of.kv_cache_dtype)
            release, _tabulated = silicon_release("mlperf", of.model, deployment)
        return self.engine.entry(release, None)

    @cached_property
    def trace(self) -> RequestTrace:
        """The requests: LoadGen's arrivals, and lengths drawn from the seed of the run."""
        arrival_us, random = schedule_us(self.run), np.random.default_rng(self.run.schedule_seed)
        prompt = self.workload.prompt.drawn(self.run.queries, random)
        output = self.workload.output.drawn(self.run.queries, random)
        return RequestTrace(arrival_us, prompt, prompt, output, np.full(self.run.queries, NEVER_US))

    def simulated_us(self, factor: float = 1.0) -> dict[tuple[str, str], float]:
        """Latencies with operator times scaled by ``factor``; TPOT as LoadGen has it, of requests of two tokens on."""
        entry, trace = self.entry, self.trace
        latency = entry.latency
        if factor != 1.0 and isinstance(latency, OperatorModel):
            scaled = {
                name: getattr(latency.coefficients, name) * factor for name in ("products", "attention", "all_reduce")
            }
            latency = replace(latency, coefficients=msgspec.structs.replace(latency.coefficients, **scaled))
        cluster = ClusterConfig(self.submission.replicas)
        result = simulate_cluster(trace, cluster, self.engine.engine, latency, entry.lifecycle).whole
        done = result.completed & (trace.output_tokens > 1)
        e2e, ttft = result.e2e_us[done], result.ttft_us[done]
        series = zip(METRICS, (e2e, ttft, (e2e - ttft) / (trace.output_tokens[done] - 1)), strict=True)
        return {(metric, name): _statistic(us, name) for metric, us in series for name in STATISTICS}


def _statistic(values: NDArray[Any], name: str) -> float:
    return float(values.mean() if name == "mean" else np.percentile(values, float(name[1:])))


def _old_scheduler(framework: str) -> bool:
    """Whether this is vLLM before 0.8, whose V1 engine was not the default."""
    words = framework.lower().replace("vllm-", "vllm ").replace("vllm v", "vllm ").partition("vllm ")[2]
    major, _, rest = words.partition(".")
    minor = rest.partition(".")[0]
    return major == "0" and minor.isdecimal() and int(minor) < 8


def fitted_factor(case: Case) -> float | None:
    """The factor on operator times that gives a run its audited mean TPOT; None if not available."""
    if not isinstance(case.entry.latency, OperatorModel) or ("tpot", "mean") not in case.run.audited_us:
        return None
    low, high, wanted = 1 / _MOST_FACTOR, _MOST_FACTOR, case.run.audited_us["tpot", "mean"]
    for _ in range(_FACTOR_STEPS):
        middle = sqrt(low * high)
        below = case.simulated_us(middle)["tpot", "mean"] < wanted
        low, high = (middle, high) if below else (low, middle)
    return sqrt(low * high)


def other_run(case: Case, cases: Sequence[Case]) -> Case | None:
    """The run on the same GPU to fit on: of the same model if there is one, the smallest of those."""
    others = [other for other in cases if other is not case and same_gpu(other.gpu, case.gpu)]
    return min(
        others,
        key=lambda o: (o.submission.model != case.submission.model, o.run.devices, o.run.path),
        default=None,
    )


@dataclass(frozen=True)
class Sites:
    """Runs of several submitters on the same machine with the same software: largest over smallest mean, less 1."""

    runs: tuple[Run, ...]

    def spread(self, metric: str) -> float:
        means = [run.audited_us[metric, "mean"] for run in self.runs]
        return max(means) / min(means) - 1


def sites_of(runs: Sequence[Run]) -> list[Sites]:
    """The groups of two submitters or more whose rates are within 2.5 % of the lowest of the group."""
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.rate_per_s):
        if run.scenario in PACED and all((metric, "mean") in run.audited_us for metric in METRICS):
            names = ("accelerator", "per_node", "nodes", "model", "framework")
            alike.setdefault((run.scenario, *(run.facts.get(name, "") for name in names)), []).append(run)
    groups: list[list[Run]] = []
    for of_kind in alike.values():
        group: list[Run] = []
        for run in of_kind:
            if not group or run.rate_per_s > group[0].rate_per_s * (1 + _SAME_RATE):
                group = []
                groups.append(group)
            group.append(run)
    return [Sites(tuple(group)) for group in groups if len({run.facts.get("submitter") for run in group}) > 1]


@dataclass(frozen=True)
class Predicted:
    """What was simulated of a run, us by metric and statistic; ``fitted_us``: with operator times scaled by ``factor``.

    ``fitted_on``: the run whose mean TPOT the factor fits.  Nothing is fitted to the run itself.
    """

    case: Case
    simulated_us: Mapping[tuple[str, str], float]
    factor: float | None
    fitted_on: Case | None
    fitted_us: Mapping[tuple[str, str], float]

    def error(self, metric: str, statistic: str, *, fitted: bool = False) -> float | None:
        """Signed relative error; None where nothing was audited or simulated."""
        audited = self.case.run.audited_us.get((metric, statistic))
        simulated = (self.fitted_us if fitted else self.simulated_us).get((metric, statistic))
        return None if not audited or simulated is None else simulated / audited - 1


def predicted(cases: Sequence[Case]) -> list[Predicted]:
    """Each run as the operator times predict it, and with these scaled to the mean TPOT of another run on its GPU."""
    factors: dict[int, float | None] = {}
    results = []
    for case in cases:
        other, factor = other_run(case, cases), None
        if other is not None:
            if id(other) not in factors:
                factors[id(other)] = fitted_factor(other)
            factor = factors[id(other)]
        fitted = {} if factor is None else case.simulated_us(factor)
        results.append(Predicted(case, case.simulated_us(), factor, None if factor is None else other, fitted))
    return results
