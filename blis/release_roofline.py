"""Roofline models in a release's YAML, both ways; measured efficiencies stand in it, so it needs no other file."""

from __future__ import annotations

from itertools import pairwise

from blis_replay.blis.architecture import format_architecture, parse_architecture
from blis_replay.blis.efficiency import Efficiency, ProductCurve
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.gpu import format_gpu, parse_gpu
from blis_replay.blis.release_fields import NS, Fields
from blis_replay.blis.roofline import MIXED_MODES, RooflineModel

_LARGEST = 10_000_000
# Faster than its peak no kernel is; tables of 8-bit products count from another peak, but stay below it, too.
_LARGEST_MFU = 1.0


def parse_roofline(fields: Fields, tensor_parallelism: int) -> RooflineModel:
    """The roofline model of a release entry; without ``efficiency`` the smooth curves.  Raises ``ReleaseError``."""
    model = RooflineModel(
        architecture=parse_architecture(fields.mapping("architecture")),
        gpu=parse_gpu(fields.mapping("gpu")),
        tensor_parallelism=tensor_parallelism,
        mixed=fields.choice("mixed", MIXED_MODES),
        efficiency=_parse_efficiency(fields.mapping("efficiency")) if "efficiency" in fields.values else None,
        bandwidth_efficiency=fields.number("bandwidth_efficiency"),
        per_layer_us=fields.quantity("per_layer", NS) / 1000,
    )
    fields.refuse_unknown()
    if not 0 < model.bandwidth_efficiency <= 1:
        fields.refuse("bandwidth_efficiency", "is not above 0 and at most 1", "write e.g. 0.82")
    if model.per_layer_us < 0:
        fields.refuse("per_layer", "is negative", "write e.g. 100 us")
    try:
        model.for_kernel()
    except ReleaseError as error:
        raise ReleaseError(f"{fields.origin}, field {fields.path.rstrip('.')}: {error}") from None
    return model


def format_roofline(model: RooflineModel) -> dict[str, object]:
    """The fields that ``parse_roofline`` reads."""
    fields: dict[str, object] = {
        "kind": "roofline",
        "mixed": model.mixed,
        "bandwidth_efficiency": model.bandwidth_efficiency,
        "per_layer": f"{model.per_layer_us:.10g} us",
        "architecture": format_architecture(model.architecture),
        "gpu": format_gpu(model.gpu),
    }
    if (efficiency := model.efficiency) is not None:
        fields["efficiency"] = {
            "products": [
                {"inputs": c.inputs, "outputs": c.outputs, "tokens": list(c.tokens), "mfu": list(c.mfu)}
                for c in efficiency.products
            ],
            "prefill": {"tokens": list(efficiency.prefill_tokens), "mfu": list(efficiency.prefill_mfu)},
            "decode": {
                "requests": list(efficiency.decode_requests),
                "context_tokens": list(efficiency.decode_context_tokens),
                "mfu": [list(row) for row in efficiency.decode_mfu],
            },
        }
    return fields


def _parse_efficiency(fields: Fields) -> Efficiency:
    products = tuple(_parse_product(product) for product in fields.list("products"))
    prefill, decode = fields.mapping("prefill"), fields.mapping("decode")
    sequence, requests = _knots(prefill, "tokens"), _knots(decode, "requests")
    contexts = _knots(decode, "context_tokens")
    rows = decode.values.get("mfu")
    if not isinstance(rows, list) or len(rows) != len(requests):
        decode.refuse("mfu", "is not a row for each of requests", "correct it")
    numbered = type(decode)({str(i): row for i, row in enumerate(rows)}, decode.origin, f"{decode.path}mfu.")
    efficiency = Efficiency(
        products=products,
        prefill_tokens=sequence,
        prefill_mfu=_mfu(prefill, "mfu", len(sequence)),
        decode_requests=requests,
        decode_context_tokens=contexts,
        decode_mfu=tuple(_mfu(numbered, name, len(contexts)) for name in numbered.values),
    )
    decode.seen.add("mfu")
    for part in (fields, prefill, decode):
        part.refuse_unknown()
    if not products:
        fields.refuse("products", "is empty", "give at least one matrix")
    return efficiency


def _parse_product(fields: Fields) -> ProductCurve:
    tokens = _knots(fields, "tokens")
    shape = fields.count("inputs", 1, _LARGEST), fields.count("outputs", 1, _LARGEST)
    curve = ProductCurve(*shape, tokens, _mfu(fields, "mfu", len(tokens)))
    fields.refuse_unknown()
    return curve


def _knots(fields: Fields, name: str) -> tuple[float, ...]:
    knots = fields.numbers_of(name)
    if not knots or knots[0] <= 0 or any(low >= high for low, high in pairwise(knots)):
        fields.refuse(name, "is empty or does not ascend from above 0", "correct it")
    return knots


def _mfu(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.numbers_of(name)
    if len(values) != count or not all(0 < value <= _LARGEST_MFU for value in values):
        fields.refuse(name, f"is not {count} shares above 0 and at most {_LARGEST_MFU:g}", "correct it")
    return values
