"""Tables of measured operator times for a model, from ``aiconfigurator-core`` (the optional extra ``silicon``).

There the time of a batch is a sum of three parts: one that depends on its tokens, attention of prefills and attention
of decodes.  So three tables hold all of it (research/silicon.md).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ReleaseError, ReplayError
from blis_replay.blis.latency.gpu_names import same_gpu
from blis_replay.blis.latency.models import Lifecycle, durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay_labs.silicon.operators import (
    DecodeAttention,
    OperatorModel,
    PrefillAttention,
    TokenTimes,
)

# Every size to 16, multiples of 8 to 512 (these choose the kernel), then four sizes per octave.
_TOKENS = (*range(1, 17), *range(24, 513, 8), *(round(512 * 2 ** (i / 4)) for i in range(1, 25)))
_PREFILL_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
_ATTENDED_TOKENS = (8, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
_DECODE_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)
_CONTEXT_TOKENS = (1, 64, 128, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072, 4_096, 8_192, 16_384, 32_768, 65_536)

# Words in the names of operators that pass something between GPUs.
_BETWEEN_GPUS = ("_ar", "all_reduce", "allreduce", "all2all", "alltoall", "dispatch", "combine", "p2p", "allgather")

_US_PER_MS = 1_000
_CHECKED_BATCHES, _SEED = 400, 42
# Tokens of context; a decode then takes little more than its products.
_SHORT = 16


# Delays without a recording; their origin is in research/silicon.md.
ZERO_SHOT_DELAYS = Lifecycle(
    pre_queue_us=9_300.0, pre_queue_source="published constant, fitted to journeys of 16 H100 experiments"
)


@dataclass(frozen=True)
class Deployment:
    """A model (its ``config.json``), the kind of GPU, and how the model is split over GPUs.

    ``gpu``: any spelling of a system of the package.  ``dtype``, ``kv_cache_dtype``: types of weights and KV cache, by
    the package's names (``bfloat16``, ``fp8``, ``nvfp4``); None: as in the configuration.
    """

    config: Path
    gpu: str
    tensor_parallelism: int = 1
    expert_parallelism: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None


@dataclass(frozen=True)
class Tabulated:
    """Tables, and the relative errors of interpolating them (mean and largest over random batches)."""

    tables: OperatorModel
    system: str
    mean_error: float
    largest_error: float
    batches: int


def silicon_systems() -> tuple[str, ...]:
    """The systems with vLLM measurements in the package; raises ``ReplayError`` without the extra."""
    with _package():
        import aiconfigurator_core

        root = Path(aiconfigurator_core.__file__).parent / "systems" / "data"
        return tuple(sorted(path.name for path in root.iterdir() if (path / "gemm").is_dir()))


def system_named(gpu: str) -> str:
    """The system of a GPU by any of its names; raises ``ReleaseError`` if the name is unknown or ambiguous."""
    systems = silicon_systems()
    matching = [gpu] if gpu in systems else [s for s in systems if same_gpu(gpu, s.replace("_", " "))]
    if len(matching) != 1:
        raise ReleaseError(f"no operator times of {gpu}; aiconfigurator-core has {', '.join(systems)}")
    return matching[0]


def tabulate(deployment: Deployment) -> Tabulated:
    """Tabulate all operators of a model on its GPUs, and measure the error of interpolation.

    Raises ``ReplayError`` without the extra, ``ReleaseError`` for a GPU or model that the package lacks.
    """
    system = system_named(deployment.gpu)
    with _package(), _model_folder(deployment.config) as folder:
        asked = AskedPackage(folder, system, deployment)
        products, prefill, decode = asked.products(), asked.prefill_attention(), asked.decode_attention()
        source = f"aiconfigurator-core {version('aiconfigurator-core')}, {system}, its current vLLM"
        tables = OperatorModel(products, prefill, decode, source=source)
        errors = asked.errors(tables)
    return Tabulated(tables, system, float(errors.mean()), float(errors.max()), len(errors))


def silicon_release(name: str, model: str, deployment: Deployment) -> tuple[CoefficientRelease, Tabulated]:
    """A release of a model from its operator times, and its tables; raises as ``tabulate``."""
    tabulated = tabulate(deployment)
    entry = ModelEntry(model, deployment.tensor_parallelism, tabulated.tables, ZERO_SHOT_DELAYS)
    summary = f"Measured operator times of {model} on {deployment.tensor_parallelism} {tabulated.system}."
    source = f"{tabulated.tables.source}; nothing fitted to this model"
    release = CoefficientRelease(name, "valid", summary, source, deployment.gpu, models=(entry,), fitted_on=())
    return parse_release(format_release(release), name), tabulated


@contextmanager
def _package() -> Iterator[None]:
    """Turn errors of the package into ours, and silence its log."""
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        yield
    except ImportError as error:
        raise ReplayError(
            f"operator times need aiconfigurator-core ({error}); pip install 'blis-replay-labs[silicon]'"
        ) from None


@contextmanager
def _model_folder(config: Path) -> Iterator[Path]:
    """A folder with the model's ``config.json``: the package reads only that name, and downloads other arguments."""
    if config.name == "config.json":
        yield config.parent.resolve()
        return
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_bytes(config.read_bytes())
        yield Path(name)


class AskedPackage:
    """The package for one deployment; all times in us."""

    def __init__(self, folder: Path, system: str, deployment: Deployment) -> None:
        import aiconfigurator_core
        from aiconfigurator_core.sdk.engine import EngineHandle

        # Without it the package looks for the configurations of its own models on the network.
        configs = Path(aiconfigurator_core.__file__).parent / "model_configs"
        os.environ.setdefault("AICONFIGURATOR_MODEL_CONFIGS_PATH", str(configs))
        tp, ep = deployment.tensor_parallelism, deployment.expert_parallelism
        try:
            self.handle: Any = EngineHandle.compile(
                str(folder),
                system,
                "vllm",
                backend_version=None,  # the newest that was measured
                tp_size=tp,
                moe_tp_size=max(tp // ep, 1),
                moe_ep_size=ep,
                gemm_quant_mode=deployment.dtype,
                moe_quant_mode=deployment.dtype,
                kvcache_quant_mode=deployment.kv_cache_dtype,
            )
        except Exception as error:
            raise ReleaseError(
                f"{deployment.config}: aiconfigurator-core has no such deployment: {_line(error)}"
            ) from None

    def mixed_us(self, tokens: int) -> float:
        """A step with prefill, without attention."""
        return float(self.handle.mixed_step_breakdown(tokens, 0, tokens, 1)[1]) * _US_PER_MS

    def decode_us(self, requests: int, context: int) -> float:
        """A step without prefill."""
        return float(self.handle.decode_step_latency(requests, context, 1)) * _US_PER_MS

    def decode_attention_us(self, requests: int, context: int) -> float:
        """The attention of the decodes of ``requests``."""
        return float(self.handle.mixed_step_breakdown(0, requests, context, 1)[3]) * _US_PER_MS

    def prefill_us(self, requests: int, tokens: int, cached: int) -> float:
        """A step of equal prefills."""
        return float(self.handle.predict_prefill_latency(requests, tokens + cached, cached)) * _US_PER_MS

    def all_reduce_us(self, tokens: int) -> float:
        """The traffic between GPUs in a step of ``tokens``."""
        shared, *_attention = self.handle.mixed_step_breakdown_per_op(tokens, 0, tokens, 1)
        parts = (us for name, us, *_ in shared if any(word in f"{name}_" for word in _BETWEEN_GPUS))
        return float(sum(parts)) * _US_PER_MS

    def products(self) -> TokenTimes:
        """The table by tokens; decode steps up to the largest number of decoding requests."""
        tokens = [n for n in _TOKENS if _answers(partial(self.mixed_us, n))]
        if len(tokens) < 2:
            raise ReleaseError(
                "aiconfigurator-core knows this deployment but has no times of it; try another --dtype, "
                "--tensor-parallelism or --expert-parallelism"
            )
        mixed = [self.mixed_us(n) for n in tokens]
        decode = [self._decode_products_us(n) for n in tokens if n <= _DECODE_REQUESTS[-1]]
        # Beyond that, decode steps grow like steps with prefill.
        beyond = np.array(mixed[len(decode) :]) * (decode[-1] / mixed[len(decode) - 1])
        reduced = [self.all_reduce_us(n) for n in tokens]
        return TokenTimes(*map(_in_tenths, (tokens, mixed, [*decode, *beyond], reduced)))

    def _decode_products_us(self, requests: int) -> float:
        return self.decode_us(requests, _SHORT) - self.decode_attention_us(requests, _SHORT)

    def prefill_attention(self) -> PrefillAttention:
        """Of one prompt, or of several shorter ones where its tokens would attend to more than asked for."""
        rows = [n for n in _PREFILL_TOKENS if _answers(partial(self.mixed_us, n))]
        times = [[self._prefill_attention_us(n, attended) for attended in _ATTENDED_TOKENS] for n in rows]
        return PrefillAttention(_in_tenths(rows), _in_tenths(_ATTENDED_TOKENS), tuple(map(_in_tenths, times)))

    def _prefill_attention_us(self, tokens: int, attended: int) -> float:
        requests, each, cached = prompts_of(tokens, attended)
        return max(self.prefill_us(requests, each, cached) - self.mixed_us(requests * each), 0.0)

    def decode_attention(self) -> DecodeAttention:
        """By requests and context."""
        times = [[self.decode_attention_us(n, context) for context in _CONTEXT_TOKENS] for n in _DECODE_REQUESTS]
        return DecodeAttention(_in_tenths(_DECODE_REQUESTS), _in_tenths(_CONTEXT_TOKENS), tuple(map(_in_tenths, times)))

    def errors(self, tables: OperatorModel) -> Floats:
        """float64[batches]: relative errors of the tables for random batches of equal decodes or prefills."""
        random = np.random.default_rng(_SEED)
        asked: list[float] = []
        batches: list[dict[str, int]] = []
        for i in range(_CHECKED_BATCHES):
            decodes, context = round(2 ** random.uniform(0, 9)), round(2 ** random.uniform(5, 13))
            tokens, cached = round(2 ** random.uniform(3, 12)), round(random.uniform(0, 4_096))
            if i % 2:
                asked_us = self.decode_us(decodes, context)
                batch = {"decode_tokens": decodes, "context_tokens": decodes * context}
            else:
                asked_us = self.prefill_us(1, tokens, cached)
                attended = tokens * cached + tokens * (tokens + 1) // 2
                batch = {"prefill_tokens": tokens, "prefill_requests": 1, "attended_tokens": attended}
            asked.append(asked_us)
            batches.append(batch)
        ratios: Floats = durations_us(tables, batches) / np.array(asked)
        return np.asarray(np.abs(ratios - 1), np.float64)


def prompts_of(tokens: int, attended: int) -> tuple[int, int, int]:
    """Number, new tokens and cached tokens of equal prompts with ``tokens`` in all that attend to ``attended`` each."""
    cached = attended - (tokens + 1) // 2
    if cached >= 0:
        return 1, tokens, cached
    each = max(2 * attended - 1, 1)
    return max(round(tokens / each), 1), each, 0


def _answers(question: Any) -> bool:
    try:
        question()
    except Exception:
        return False
    return True


def _in_tenths(values: Iterable[float]) -> tuple[float, ...]:
    """Rounded as a release writes them."""
    return tuple(round(float(value), 1) for value in values)


def _line(error: Exception) -> str:
    """The first line of an error of the package."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
