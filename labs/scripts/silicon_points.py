"""Zero-shot error on the public serving points of aiconfigurator-core: mean TTFT and TPOT at a fixed concurrency.

    python labs/scripts/silicon_points.py              # needs the extra: pip install 'blis-replay-labs[silicon]'
    python labs/scripts/silicon_points.py --mixtures   # mixtures of experts instead of dense models

Each point is a small experiment: so many clients, 10 requests for each, lengths uniform between 80 and 100 % of the
stated ones (as the benchmark draws them), simulated from operator times as measured.  Two things are not measured.  The
delay before the queue comes from points of other GPUs than the one tried, by one rule after the other (``RULES``).  The
host time of a step and of each of its requests comes last, from points of other models on the same GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
from scipy.optimize import linprog

from blis_replay.base.arrays import Floats
from blis_replay.blis.closed_loop import ClosedLoop, simulate_closed_loop
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay_labs.silicon.operators import AS_MEASURED, OperatorCoefficients, OperatorModel
from blis_replay_labs.silicon.tabulate import Deployment, tabulate

# Above it queues begin to decide, and memory, whose size the points do not state.
_MOST_CLIENTS = 32
_REQUESTS_PER_CLIENT, _SHORTEST, _SEED = 10, 0.8, 1
_BUDGET_TOKENS, _MOST_LENGTH = 8_192, 131_072
# Releases of vLLM before this one scheduled synchronously unless told otherwise.
_SYNCHRONOUS = ("0.11", "0.12", "0.13")


@dataclass(frozen=True)
class Point:
    """A measured point; ``tables`` of its deployment; times in ms."""

    gpu: str
    model: str
    version: str
    clients: int
    prompt: int
    output: int
    ttft_ms: float
    tpot_ms: float
    tables: OperatorModel

    @property
    def asynchronous(self) -> bool:
        """Whether its server scheduled a step while the one before ran; releases of no stated number did."""
        return not self.version.startswith(_SYNCHRONOUS)


def main() -> None:
    """Print the errors, and what was left out with its reason."""
    mixtures = "--mixtures" in sys.argv
    points, left_out = measured_points(mixtures)
    others, _ = measured_points(not mixtures)
    donors = points + others
    observed = np.array([[point.ttft_ms, point.tpot_ms] for point in donors])
    undelayed = np.array([simulated(point) for point in donors])
    print(f"{len(points)} points; left out: {', '.join(f'{n} {why}' for why, n in left_out.most_common())}\n")
    print("| delay from | points | TPOT mean abs | bias | TTFT mean abs | bias | delay ms |")
    print("|---|---|---|---|---|---|---|")
    row("nowhere", (undelayed / observed - 1)[: len(points)], "0")
    for name, alike, per_token in RULES:  # the last one is used below, too
        found, used = left_one_out(points, donors, observed, undelayed, alike, per_token)
        row(f"{name}, all", found, "")
        for group, of_them in groups(points, lambda p: p.gpu):
            row(f"{name}: {group}", found[of_them], "; ".join(sorted({used[i] for i in of_them.tolist()})))
    if mixtures:  # whose operator times are further off than that
        return
    host = host_times(points, observed[: len(points), 1], undelayed[: len(points), 1])
    undelayed[: len(points)] = [simulated(point, of) for point, of in zip(points, host, strict=True)]
    found, _used = left_one_out(points, donors, observed, undelayed, alike, per_token)
    row("and host time from other models on the same GPU, all", found, "")
    for by in (
        *(lambda p: p.gpu, _scheduling, lambda p: p.version, lambda p: f"{p.clients:2} clients"),
        lambda p: f"{p.model}, {p.gpu}",
    ):
        for group, of_them in groups(points, by):
            times = {f"{host[i].per_step_us / 1e3:.2f} + {host[i].per_request_us / 1e3:.3f}" for i in of_them.tolist()}
            row(f"and host time: {group}", found[of_them], f"host ms a step, a request {'; '.join(sorted(times))}")


def host_times(points: Sequence[Point], observed_ms: Floats, simulated_ms: Floats) -> list[OperatorCoefficients]:
    """What TPOT lacks by the step and by the client with other models on the same GPU; nothing if there are none."""
    clients = np.array([point.clients for point in points], np.float64)
    fits: dict[tuple[str, str], OperatorCoefficients] = {}
    for point in points:
        of = [i for i, other in enumerate(points) if other.gpu == point.gpu and other.model != point.model]
        if of:
            step_ms, request_ms = fitted(observed_ms[of], simulated_ms[of], 1000 * clients[of], per_token=True)
            fits[point.gpu, point.model] = OperatorCoefficients(
                per_step_us=1e3 * step_ms, per_request_us=1e3 * request_ms
            )
    return [fits.get((point.gpu, point.model), AS_MEASURED) for point in points]


# Whose delay a point takes: a name, which of others it is, and whether each prompt token has a part in it.
RULES: tuple[tuple[str, Callable[[Point, Point], bool], bool], ...] = (
    ("other GPUs", lambda one, of: one.gpu != of.gpu, False),
    (
        "other GPUs that schedule alike",
        lambda one, of: one.gpu != of.gpu and one.asynchronous == of.asynchronous,
        False,
    ),
    ("the same, and by the token", lambda one, of: one.gpu != of.gpu and one.asynchronous == of.asynchronous, True),
    (
        "other GPUs and models that schedule alike, by the token",
        lambda one, of: one.gpu != of.gpu and one.model != of.model and one.asynchronous == of.asynchronous,
        True,
    ),
)


def _scheduling(point: Point) -> str:
    return "asynchronous" if point.asynchronous else "synchronous"


def row(name: str, found: Floats, coefficients: str) -> None:
    """A line of the table; ``found``: float64[points, 2], relative errors of TTFT and TPOT."""
    (ttft, tpot), (ttft_bias, tpot_bias) = 100 * np.abs(found).mean(axis=0), 100 * found.mean(axis=0)
    print(
        f"| {name} | {len(found)} | {tpot:.1f} % | {tpot_bias:+.1f} % | {ttft:.1f} % | {ttft_bias:+.1f} % "
        f"| {coefficients} |",
        flush=True,
    )


def groups(points: Sequence[Point], of: Callable[[Point], str]) -> list[tuple[str, Floats]]:
    """Each value of ``of`` with the places of its points."""
    names = np.array([of(point) for point in points])
    return [(name, np.flatnonzero(names == name)) for name in sorted(set(names.tolist()))]


def left_one_out(
    points: Sequence[Point],
    donors: Sequence[Point],
    observed: Floats,
    undelayed: Floats,
    alike: Callable[[Point, Point], bool],
    per_token: bool,
) -> tuple[Floats, list[str]]:
    """float64[points, 2]: errors of each point, the first of ``donors``, with the delay of those that ``alike`` allows.

    And what that delay was, in words, for each.
    """
    found, used = (undelayed / observed - 1)[: len(points)], []
    fits: dict[tuple[str, str, bool], tuple[float, float]] = {}
    for i, point in enumerate(points):
        key = point.gpu, point.model, point.asynchronous
        if key not in fits:
            of = [j for j, donor in enumerate(donors) if alike(donor, point)]
            prompts = np.array([donors[j].prompt for j in of])
            fits[key] = fitted(observed[of, 0], undelayed[of, 0], prompts, per_token) if of else (0.0, 0.0)
        constant, per_1000 = fits[key]
        found[i, 0] += (constant + per_1000 * point.prompt / 1000) / observed[i, 0]
        used.append(f"{constant:.1f}" + (f" + {per_1000:.1f} a 1,000 tokens" if per_token else ""))
    return found, used


def fitted(observed_ms: Floats, undelayed_ms: Floats, prompts: Floats, per_token: bool) -> tuple[float, float]:
    """The delay (ms, and ms per 1,000 prompt tokens) of the least sum of absolute relative errors; neither negative."""
    count = len(observed_ms)
    per_1000 = prompts / 1000 if per_token else np.zeros(count)
    # What a delay leaves of the rest is above or below it, and costs its size over the TTFT.
    design = np.column_stack([np.ones(count), per_1000, np.eye(count), -np.eye(count)])
    cost = np.concatenate([[0, 0], 1 / observed_ms, 1 / observed_ms])
    solution = linprog(cost, A_eq=design, b_eq=observed_ms - undelayed_ms).x
    return float(solution[0]), float(solution[1])


def simulated(point: Point, host: OperatorCoefficients = AS_MEASURED) -> tuple[float, float]:
    """Mean TTFT and TPOT, ms, without a delay before the queue: in a closed loop it moves all of a run alike."""
    random, count = np.random.default_rng(_SEED), point.clients * _REQUESTS_PER_CLIENT
    prompts, outputs = (
        random.integers(int(_SHORTEST * n), n + 1, count).astype(np.int64) for n in (point.prompt, point.output)
    )
    trace = RequestTrace(np.zeros(count, np.int64), prompts, prompts, outputs, np.full(count, NEVER_US))
    engine = EngineConfig(1_024, _BUDGET_TOKENS, _MOST_LENGTH, point.asynchronous)
    model = replace(point.tables, coefficients=host)
    result = simulate_closed_loop(trace, engine, model, ClosedLoop(point.clients))
    gaps_us = (result.e2e_us - result.ttft_us) / (result.output_tokens - 1)
    return float(result.ttft_us.mean()) / 1e3, float(gaps_us.mean()) / 1e3


def measured_points(mixtures: bool) -> tuple[list[Point], Counter[str]]:
    """The points that the tables cover, of mixtures of experts or of dense models; how many others, by reason."""
    import aiconfigurator_core

    root = Path(aiconfigurator_core.__file__).parent
    frame = pl.read_csv(root / "systems" / "silicon_sample.csv", infer_schema_length=None)
    frame = frame.filter(pl.col("backend") == "vllm")
    reasons = {
        "with prefill and decode apart": pl.col("mode") != "agg",
        "with data or pipeline parallelism": (pl.col("pp_size") > 1)
        | (pl.col("attention_dp_size").fill_null(1) > 1)
        | ((pl.col("moe_tp_size") * pl.col("moe_ep_size") != pl.col("tp_size")) & (pl.col("moe_tp_size") > 1)),
        "without a stated concurrency": ~pl.col("silicon_data_source").str.contains("silicon_concurrency=")
        & ~pl.col("silicon_data_source").str.contains("_c[0-9]"),
        f"with more than {_MOST_CLIENTS} clients": pl.col("batch_size") > _MOST_CLIENTS,
        "without TTFT or TPOT": pl.col("silicon_ttft_ms").is_null() | pl.col("silicon_tpot_ms").is_null(),
    }
    left_out: Counter[str] = Counter()
    for why, which in reasons.items():
        left_out[why] += frame.filter(which.fill_null(False)).height
        frame = frame.filter(~which.fill_null(False))
    keys = ["model_path", "system", "gemm_quant_mode", "tp_size", "moe_ep_size", "precision"]
    points: list[Point] = []
    for (model, gpu, dtype, tp, ep, precision), rows in frame.group_by(keys, maintain_order=True):
        tables = _tables(root, str(model), str(gpu), dtype, int(str(tp)), int(str(ep or 1)), precision, mixtures)
        if isinstance(tables, str):
            left_out[tables] += rows.height
            continue
        for one in rows.iter_rows(named=True):
            times = float(one["silicon_ttft_ms"]), float(one["silicon_tpot_ms"])
            lengths = int(one["batch_size"]), int(one["isl"]), int(one["osl"])
            version = str(one["backend_version"] or "unknown")
            points.append(Point(str(gpu), str(model), version, *lengths, *times, tables))
    return points, left_out


def _tables(
    root: Path, model: str, gpu: str, dtype: object, tp: int, ep: int, precision: object, mixtures: bool
) -> OperatorModel | str:
    """The tables of a deployment, or why there are none."""
    name = model.replace("/", "--").replace("Llama-3.1-70B", "Meta-Llama-3.1-70B")
    config = root / "model_configs" / f"{name}_config.json"
    if not config.exists():
        return "of models whose configuration the package does not have"
    text = config.read_text("utf-8")
    if ("expert" in text) != mixtures:
        return "of dense models" if mixtures else "of mixtures of experts"
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        copy.write_bytes(config.read_bytes())
        # A configuration that is quantised says how; the points name only the bits.
        as_configured = precision in (None, "bf16") or (precision != "fp4" and "quantization_config" in text)
        asked = None if dtype is None or as_configured else str(dtype)
        try:
            return tabulate(Deployment(copy, gpu, tp, max(ep, 1), asked)).tables
        except ReleaseError as error:
            print(f"{model} {gpu} {asked} tp {tp}: {error}", file=sys.stderr)
            return "of deployments that the package has no times of"


if __name__ == "__main__":
    main()
