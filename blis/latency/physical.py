"""Step time from a model's architecture and a GPU's datasheet, with coefficients that models share.

Every cost is a physical time at the datasheet's peaks times a coefficient near one, or a
count (layers, requests) times a coefficient in us.  What is linear in the batch is linear in
the six numbers of ``QUANTITIES``; only the experts that a batch touches are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import astuple

from blis_replay.base.arrays import Floats
from blis_replay.base.document import UNWRITTEN, FieldError, NonNegativeTime
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.kernel import step_time
from blis_replay.blis.latency.datasheets import Architecture, Gpu

# What of a batch costs time, after the step itself: prefill tokens, decode tokens, KV tokens that the decodes attend
# to, KV tokens that the prefill tokens attend to, and requests.
QUANTITIES = ("step", "prefill_tokens", "decode_tokens", "context_tokens", "attended_tokens", "requests")
STEP, PREFILL, DECODE, CONTEXT, ATTENDED, REQUESTS = range(6)

_US = 1e6
_PS_PER_US = step_time.PS_PER_US

# An all-reduce after attention and one after the feed-forward network (Megatron-LM, arXiv:1909.08053).
_ALL_REDUCES_PER_LAYER = 2

# No server is slower, and larger sums would not fit 64 bits.
_LONGEST_TOKEN_US = 1e5
_LONGEST_STEP_US = 8.64e10

# Batches beyond this have touched every expert of any model.
_LONGEST_TABLE = 100_000


Multiple = Annotated[float, Meta(ge=0, le=1e15)]


class PhysicalCoefficients(Struct, frozen=True, rename=lambda name: name.removesuffix("_us")):
    """What models share; none is negative.

    Multiples of the time at the datasheet's peak: ``weight_read``, ``kv_read``,
    ``prefill_compute``, ``decode_compute``, ``traffic`` (all-reduced bytes over the link).
    In us: ``per_layer_us``; ``per_exchange_us`` (one of the ceil(log2 GPUs) rounds of messages in an
    all-reduce); ``per_moe_layer_us``; ``per_step_us``; ``per_request_us``.
    """

    weight_read: Multiple
    kv_read: Multiple
    prefill_compute: Multiple
    decode_compute: Multiple
    traffic: Multiple
    per_layer_us: NonNegativeTime
    per_exchange_us: NonNegativeTime
    per_moe_layer_us: NonNegativeTime
    per_step_us: NonNegativeTime
    per_request_us: NonNegativeTime

    def as_array(self) -> Floats:
        """float64[10], in the order of ``COEFFICIENT_NAMES``."""
        return np.array([getattr(self, name) for name in COEFFICIENT_NAMES])


COEFFICIENT_NAMES = PhysicalCoefficients.__struct_fields__


@dataclass(frozen=True)
class PhysicalModel:
    """Step time of one model on its GPUs.

    The cost of each quantity of a batch is the sum of coefficient times unit time, rounded to
    whole picoseconds (half to even).  So is the time to read the experts for each number of
    batch tokens.  A step is their sum in integers, rounded half up to whole us, at least 1.
    """

    architecture: Architecture
    gpu: Gpu
    coefficients: PhysicalCoefficients
    tensor_parallelism: Annotated[int, UNWRITTEN] = 1  # its entry in a release has it

    def __post_init__(self) -> None:
        if not any(astuple(self.coefficients)):
            raise FieldError("coefficients", "are all 0", "fit them again")

    def for_kernel(self) -> step_time.KernelModel:
        """Kind, integer and float parameters as ``kernel.step_time`` reads them.

        Raises ``ReleaseError`` if a token costs more than 0.1 s or a step more than a day.
        """
        shared = self.coefficients.as_array()
        costs_us = shared @ unit_times_us(self.architecture, self.gpu, self.tensor_parallelism)
        read_us = self.coefficients.weight_read * expert_read_us(self.architecture, self.gpu, self.tensor_parallelism)
        experts_us = read_us * touched_table(self.architecture)
        if not (max(costs_us[1:]) <= _LONGEST_TOKEN_US and max(costs_us[STEP], experts_us[-1]) <= _LONGEST_STEP_US):
            raise ReleaseError("a token takes more than 0.1 s or a step more than a day; check architecture and GPU")
        head = [*(round(float(cost) * _PS_PER_US) for cost in costs_us), _PS_PER_US // 2]
        table = np.rint(experts_us * _PS_PER_US).astype(np.int64)
        return step_time.PHYSICAL, np.concatenate([np.array(head, np.int64), table]), np.zeros(0)


def unit_times_us(architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> Floats:
    """float64[10, 6]: us that a unit of each quantity costs for each coefficient at 1.

    Weights and KV cache are read once a step, split over the GPUs; FLOPs and all-reduced bytes
    are counted per token; the output projection runs once a request.  A row per coefficient, a
    column per quantity; experts are not in it (``expert_read_us``).
    """
    gpus, width = tensor_parallelism, architecture.bytes_per_parameter
    memory, compute, link = gpu.memory_bytes_per_s / _US, gpus * gpu.flops_at(width) / _US, gpu.link_bytes_per_s / _US
    rows = {name: np.zeros(len(QUANTITIES)) for name in COEFFICIENT_NAMES}
    rows["weight_read"][STEP] = architecture.always_read_parameters * width / gpus / memory
    rows["kv_read"][CONTEXT] = architecture.kv_bytes_per_token(gpus) / memory
    token_us = architecture.layer_flops_per_token / compute
    pair_us = architecture.attention_flops_per_pair / compute
    rows["prefill_compute"][[PREFILL, ATTENDED]] = token_us, pair_us
    rows["decode_compute"][[DECODE, CONTEXT, REQUESTS]] = (
        token_us,
        pair_us,
        2 * architecture.embedding_parameters / compute,
    )
    rows["traffic"][[PREFILL, DECODE]] = all_reduced_bytes_per_token(architecture, gpus) / link
    rows["per_layer_us"][STEP] = architecture.layers
    rows["per_exchange_us"][STEP] = _ALL_REDUCES_PER_LAYER * architecture.layers * (gpus - 1).bit_length()
    rows["per_moe_layer_us"][STEP] = architecture.layers if architecture.experts else 0
    rows["per_step_us"][STEP] = 1
    rows["per_request_us"][REQUESTS] = 1
    return np.array([rows[name] for name in COEFFICIENT_NAMES])


def all_reduced_bytes_per_token(architecture: Architecture, gpus: int) -> float:
    """Bytes that each link carries for a token; a ring moves 2 (n - 1) / n of a message (Patarasuk and Yuan, 2009)."""
    message = architecture.hidden_size * architecture.bytes_per_parameter
    return _ALL_REDUCES_PER_LAYER * architecture.layers * message * 2 * (gpus - 1) / gpus


def expert_read_us(architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> float:
    """Time to read one expert of every layer at the datasheet's bandwidth, split over the GPUs."""
    read = architecture.layers * architecture.expert_parameters * architecture.bytes_per_parameter
    return read / tensor_parallelism / gpu.memory_bytes_per_s * _US


# What vLLM takes of a GPU by itself (--gpu-memory-utilization), and the size of its blocks.
_MEMORY_SHARE, _BLOCK_TOKENS = 0.9, 16


def most_kv_blocks(architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> int | None:
    """KV blocks of 16 tokens that there is room for beside the weights, with vLLM's default of 90 % of the memory.

    Activations and CUDA graphs take some of it, so a server has fewer.  None where the datasheet has no memory.
    """
    if gpu.memory_bytes is None:
        return None
    weights = architecture.parameters * architecture.bytes_per_parameter / tensor_parallelism
    block = architecture.kv_bytes_per_token(tensor_parallelism) * _BLOCK_TOKENS
    return max(int((_MEMORY_SHARE * gpu.memory_bytes - weights) / block), 0)


def touched_table(architecture: Architecture) -> Floats:
    """float64[n]: experts of a layer that 0, 1, ... n - 1 batch tokens touch; more tokens touch as many as the last.

    ``E * (1 - (1 - k / E)^tokens)``, each token choosing k of E at random.  By repeated
    multiplication, which gives the same numbers on every machine; the table ends where nothing
    that could be measured is missing.
    """
    experts = architecture.experts
    if not experts:
        return np.zeros(1)
    missed, share = [1.0], 1 - architecture.experts_per_token / experts
    while missed[-1] > 1e-9 and len(missed) < _LONGEST_TABLE:
        missed.append(missed[-1] * share)
    return experts * (1 - np.array(missed))
