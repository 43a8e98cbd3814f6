"""The kinds of latency models that a release may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, inspect

from blis_replay.base.addons import addon, addons, in_labs
from blis_replay.base.document import FieldError, document_of, shown
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import Latency, LatencyModel, RegimeModel

# The type of the models of a ``kind``.  An add-on ``latency.KIND`` plugs in another, as this distribution does with
# `physical`, which few runs need.
LATENCY_KINDS: dict[str, type[Any]] = {
    "blackbox": LatencyModel,
    "floor": LatencyModel,
    "roofline": LatencyModel,
    "regimes": RegimeModel,
}
# Kinds of blis-replay-labs.
LAB_KINDS = ("operators",)


class _LatencyKinds:
    """``LATENCY_KINDS`` and what is plugged in, as ``base.document.Kinds``."""

    def type_of(self, kind: object, place: str) -> type[Any]:
        if isinstance(kind, str):
            model: type[Any] | None = LATENCY_KINDS.get(kind) or addon("latency", kind)
            if model is not None:
                return model
            if kind in LAB_KINDS:
                raise FieldError(place, *in_labs(f"is {shown(kind)}, which").split("; ", 1))
        known = f"one of {', '.join([*LATENCY_KINDS, *addons('latency')])}"
        if kind is None:
            raise FieldError(place, "is missing", f"add {known}")
        raise FieldError(place, f"is {shown(kind)}", f"write {known}")

    def kind_of(self, value: Any) -> str:
        if isinstance(value, LatencyModel):
            return value.kind
        own = (kind for kind, model in LATENCY_KINDS.items() if model is type(value))
        plugged = (kind for kind in addons("latency") if addon("latency", kind) is type(value))
        if (kind := next(own, None) or next(plugged, None)) is None:
            raise ReleaseError("observed cycles are of one recording; a release needs a fitted model")
        return kind


_BY_KIND = Annotated[Any, Meta(extra={"kinds": _LatencyKinds()})]
# The type of a field with a latency model: of any type, for what reads it by its kind.
if TYPE_CHECKING:
    LatencyOfKind = Latency
else:
    LatencyOfKind = _BY_KIND


def format_latency(model: Latency) -> dict[str, object]:
    """The fields that a release has of a model; raises ``ReleaseError`` for observed cycles."""
    document: dict[str, object] = document_of(model, inspect.type_info(_BY_KIND))
    return document
