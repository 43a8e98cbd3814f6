"""Step time by the roofline: each layer's work at the peak its kernels reach, or its bytes at the bandwidth.

The form and its parameters are those of BLIS's roofline model (blis-semantics 3.4): products and attention by
MFU tables, 82 % of the bandwidth, 100 us a layer, nothing fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.efficiency import Efficiency, Floats, layer_products, network_products, smooth_efficiency
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.gpu import Gpu
from blis_replay.blis.kernel import roofline, step_time
from blis_replay.blis.kernel.state import LONGEST_STEP_US
from blis_replay.blis.physical import all_reduced_bytes_per_token, expert_read_us, touched_table

Mixed = Literal["weighted", "token_proportional", "additive", "largest"]
MIXED_MODES: tuple[Mixed, ...] = ("weighted", "token_proportional", "additive", "largest")

# As published for the H100.
BANDWIDTH_EFFICIENCY = 0.82
PER_LAYER_US = 100.0

# More tokens than a step has on any recorded server; their products take time in proportion beyond.
_TABLE_TOKENS = 16_384
_US = 1e6


@dataclass(frozen=True)
class RooflineModel:
    """Step time of one model on its GPUs, nothing fitted.

    ``mixed``: how a step that prefills and decodes takes its time from the two phases.  ``weighted``: 3/4 prefill
    where that has more than 4 times the tokens (and 100), 0.65 decode where that has more than twice (and 50), else
    as ``token_proportional``, the mean by tokens.  ``additive``: products of all tokens at once, attention of both,
    weights read once.  ``largest``: the longer phase.  ``efficiency`` None: ``smooth_efficiency``.
    ``bandwidth_efficiency``: share of the datasheet's bandwidth.  ``per_layer_us``: a layer's overhead on one GPU,
    divided by their number as BLIS has it.
    """

    architecture: Architecture
    gpu: Gpu
    tensor_parallelism: int
    mixed: Mixed = "weighted"
    efficiency: Efficiency | None = None
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    per_layer_us: float = PER_LAYER_US

    def for_kernel(self) -> step_time.KernelModel:
        """Kind, integer and real coefficients as ``kernel.roofline`` reads them.

        Raises ``ReleaseError`` if a step of the longest table takes more than an hour.
        """
        a, gpus = self.architecture, self.tensor_parallelism
        efficiency = self.efficiency or smooth_efficiency(a, self.gpu, gpus)
        head, products = self._head_us(), self._products_us(efficiency)
        experts = expert_read_us(a, self.gpu, gpus) / self.bandwidth_efficiency * touched_table(a)
        curves = [efficiency.prefill_tokens, efficiency.prefill_mfu, efficiency.decode_requests]
        curves += [efficiency.decode_context_tokens, *efficiency.decode_mfu]
        real = np.concatenate([head, products, experts, *curves])
        if not np.isfinite(real).all() or head.sum() + products[-1] + experts[-1] > LONGEST_STEP_US:
            raise ReleaseError("a step takes more than an hour; check architecture, GPU and efficiencies")
        sizes = [len(products), len(experts), *(len(curves[i]) for i in (0, 2, 3))]
        return step_time.ROOFLINE, np.array([MIXED_MODES.index(self.mixed), *sizes], np.int64), real

    def _head_us(self) -> Floats:
        """What a step, a token and a pair of tokens cost, in the places of ``kernel.roofline``."""
        a, gpus = self.architecture, self.tensor_parallelism
        kv_bytes = a.kv_bytes_per_token(gpus)
        passed_on_bytes = a.layers * a.hidden_size * a.bytes_per_parameter / gpus
        head = np.zeros(roofline.HEAD)
        head[roofline.STEP_US] = self.per_layer_us * a.layers / gpus
        head[roofline.WEIGHTS_US] = self._bandwidth_us(a.always_read_parameters * a.bytes_per_parameter / gpus)
        head[roofline.KV_US] = self._bandwidth_us(kv_bytes)
        head[roofline.TOKEN_US] = self._bandwidth_us(kv_bytes + passed_on_bytes)
        head[roofline.TRAFFIC_US] = all_reduced_bytes_per_token(a, gpus) / self.gpu.link_bytes_per_s * _US
        head[roofline.PAIR_US] = a.attention_flops_per_pair / gpus / self.gpu.flops_per_s * _US
        return head

    def _bandwidth_us(self, size_bytes: float) -> float:
        return size_bytes / (self.gpu.memory_bytes_per_s * self.bandwidth_efficiency) * _US

    def _products_us(self, efficiency: Efficiency) -> Floats:
        """float64[n]: the products of all layers for 0, 1, ... n - 1 tokens; experts get equal shares of theirs."""
        a = self.architecture
        tokens = np.arange(1, _TABLE_TOKENS + 1, dtype=np.float64)
        layer_us = sum(self._product_us(efficiency, tokens, *shape) for shape in layer_products(a))
        touched, rows = np.ones(len(tokens)), tokens
        if a.experts:
            touched = a.experts * (1 - (1 - a.experts_per_token / a.experts) ** tokens)
            rows = tokens * a.experts_per_token / touched
        for shape in network_products(a):
            layer_us = layer_us + touched * self._product_us(efficiency, rows, *shape)
        return np.concatenate([[0.0], a.layers * layer_us / self.tensor_parallelism])

    def _product_us(self, efficiency: Efficiency, tokens: Floats, inputs: int, outputs: int) -> Floats:
        """One product on one GPU: its FLOPs at the peak it reaches, or its matrix at the bandwidth."""
        reached = self.gpu.flops_per_s * efficiency.product_mfu(tokens, inputs, outputs)
        read_us = self._bandwidth_us(inputs * outputs * self.architecture.bytes_per_parameter)
        return np.maximum(2 * tokens * inputs * outputs / reached * _US, read_us)
