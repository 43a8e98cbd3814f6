"""Settings of a configuration laid over those that all have in common."""

from __future__ import annotations

from collections.abc import Mapping

# A mapping that says what it is takes the place of another: its parameters are no others'.
_KINDS = ("kind", "process", "distribution")


def merged(common: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """The common settings with one's own in their place, mapping by mapping; None takes a setting away."""
    result = dict(common)
    for name, value in own.items():
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(before, dict) and isinstance(value, dict) and not any(kind in value for kind in _KINDS):
            result[name] = merged(before, value)
        else:
            result[name] = value
    return result
