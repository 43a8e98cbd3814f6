"""Documents held against docs/schema.json: the part of JSON Schema that it uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA: Mapping[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "schema.json").read_text("utf-8"))
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **{"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)},
    **{"number": (int, float), "integer": int},
}


def problems(document: Any, schema: Mapping[str, Any] | None = None, place: str = "") -> Iterator[str]:
    """What of a document is not as its schema says; without one, as that of its own ``schema`` says."""
    if schema is None:
        name = document["schema"].split("/")[1]
        schema = SCHEMA["$defs"].get(name) or SCHEMA["$defs"]["answer"]
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", list(_TYPES))
    is_type = any(isinstance(document, _TYPES[kind]) for kind in kinds)
    if not is_type or (isinstance(document, bool) and "boolean" not in kinds):
        yield f"{place}: {document!r:.40} is not {kinds}"
        return
    if "enum" in schema and document not in schema["enum"]:
        yield f"{place}: {document!r:.40} is none of {schema['enum']}"
    if isinstance(document, dict):
        yield from (f"{place}: lacks {name}" for name in schema.get("required", ()) if name not in document)
        others = schema.get("additionalProperties", {})
        for name, value in document.items():
            yield from problems(value, schema.get("properties", {}).get(name, others or {}), f"{place}/{name}")
    if isinstance(document, list):
        for i, value in enumerate(document):
            yield from problems(value, schema.get("items", {}), f"{place}/{i}")
