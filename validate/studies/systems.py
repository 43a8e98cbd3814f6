"""What the cross-model studies compare: two sets of coefficients, with the engine that each was published with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blis_replay.blis.verification.phases import LLAMA_8B_TP2, SECOND_SET, CoefficientSet


@dataclass(frozen=True)
class System:
    """Coefficients, and the token budget and KV blocks (without vLLM's reserved one) of each engine."""

    name: str
    coefficients: CoefficientSet
    max_num_batched_tokens: int
    kv_blocks: int


_A = System("A", LLAMA_8B_TP2, 2048, 132_139)
_B = System("B", SECOND_SET, 4096, 65_833)

# The last two tell the budget from the coefficients.
SYSTEMS = {
    system.name: system
    for system in (
        _A,
        _B,
        replace(_A, name="A 4096", max_num_batched_tokens=4096),
        replace(_B, name="B 2048", max_num_batched_tokens=2048),
    )
}
