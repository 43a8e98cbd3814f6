"""Replays with other engine arguments, as tables and as JSON."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from blis_replay.replay.engine_overrides import EngineOverrides, EngineValue, override_text
from blis_replay.validate.metrics import relative_error
from blis_replay.validate.terminal import Toned, percent, table, tables, wrap
from blis_replay.validate.whatif import WhatIf, WhatIfPoint

if TYPE_CHECKING:
    import polars as pl

_LABELS = {
    "ttft_mean_ms": "TTFT mean ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_mean_ms": "ITL mean ms",
    "itl_p99_ms": "ITL p99 ms",
    "e2e_mean_ms": "E2E mean ms",
    "e2e_p99_ms": "E2E p99 ms",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "running": "mean depth",
    "waiting": "mean queue",
    "preemptions": "preemptions",
    "kv_peak": "KV peak",
}
_LATENCIES = ("ttft_mean_ms", "ttft_p99_ms", "itl_mean_ms", "itl_p99_ms", "e2e_mean_ms", "e2e_p99_ms")
_LOAD = ("requests_per_s", "output_tokens_per_s", "running", "waiting", "preemptions", "kv_peak")


def whatif_text(found: WhatIf) -> str:
    """The page: one change beside the recorded arguments, or the tables of a grid; and what they rest on."""
    (point, *others) = found.points
    page = _grid(found) if others else _beside(found.recorded, point)
    return "\n\n".join([_head(found), page, *_remarks(found), _provenance(found)])


def whatif_json(found: WhatIf) -> dict[str, object]:
    """Plain values; ``change`` are those of a point over those with the recorded arguments, less one."""
    return {
        "slug": found.recording.slug,
        "alias": found.recording.alias,
        "recorded": {"engine": _recorded_arguments(found), "values": found.recorded.values},
        "points": [
            {
                "overrides": dict(point.overrides),
                "values": point.values,
                "change": _changes(found.recorded, point),
                "reason": point.reason,
            }
            for point in found.points
        ],
        "observed_with": "the recorded arguments only",
        "provenance": {
            "blis_replay": version("blis-replay"),
            "recording_hash": found.recording.content_hash,
            "coefficients": found.release.name,
            "coefficients_hash": found.release.sha256,
            "basis": found.basis,
        },
    }


def whatif_frame(found: WhatIf) -> pl.DataFrame:
    """A row a point, the recorded arguments first: ``overrides``, its values, and ``reason`` where it has none."""
    import polars as pl

    rows = [
        {
            "overrides": _written(point.overrides),
            **dict.fromkeys(_LABELS),
            **(point.values or {}),
            "reason": point.reason,
        }
        for point in (found.recorded, *found.points)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def _head(found: WhatIf) -> str:
    common = _common(found)
    changed = f" with {_written(common)}" if common else ""
    return wrap(
        f"{found.recording.alias}  ({found.recording.slug}){changed}, simulated",
        mark=Toned(found.recording.alias, "heading"),
    )


def _beside(recorded: WhatIfPoint, changed: WhatIfPoint) -> str:
    changes = _changes(recorded, changed) or {}
    rows = [
        [label, _cell(recorded, name), _cell(changed, name), percent(changes.get(name))]
        for name, label in _LABELS.items()
    ]
    return table(["", "as recorded", "changed", "change"], rows)


def _grid(found: WhatIf) -> str:
    """The points by number, and their values: latencies and load beside each other where there is room."""
    points = [found.recorded, *found.points]
    rows = [["0", "as recorded"], *([str(i), _name(found, p)] for i, p in enumerate(found.points, 1))]
    names = table(["", "engine arguments"], rows, left=2)
    values = [[str(i), *(_cell(p, name) for name in _LABELS)] for i, p in enumerate(points) if p.values is not None]
    columns = {name: i for i, name in enumerate(_LABELS, 1)}
    parts = [[0, *(columns[name] for name in part)] for part in (_LATENCIES, _LOAD)]
    return "\n\n".join([names, *tables(["", *_LABELS.values()], values, parts)])


def _remarks(found: WhatIf) -> list[str]:
    """What was not served, and what is not the same work."""
    lines = []
    for point in found.points:
        name, values = _name(found, point), point.values
        if values is None:
            lines.append(f"cannot be served with {name}: {point.reason}")
        elif values["cut_short"]:
            lines.append(f"{name}: {values['cut_short']:,} outputs end at max_model_len, so less is served")
    return ["\n".join(map(wrap, lines))] if lines else []


def _provenance(found: WhatIf) -> str:
    engine = _written(tuple(_recorded_arguments(found).items()))
    lines = [
        f"coefficients: {found.release.name}; all numbers are simulated. The server was observed with the recorded "
        f"arguments only ({engine}): `blis-replay validate --experiment {found.recording.alias}` says how far the "
        "simulator is from it there, and nothing says it elsewhere.",
        *(f"{what}: {how}" for what, how in found.basis.items()),
    ]
    return "\n".join(map(wrap, lines))


def _recorded_arguments(found: WhatIf) -> dict[str, EngineValue]:
    """Of the arguments that a point changes, those recorded."""
    names = sorted({name for point in found.points for name, _ in point.overrides})
    engine = found.recording.engine
    return {name: _whole(engine[name].value) if name in engine else None for name in names}


def _whole(value: int | float | bool | str) -> EngineValue:
    return int(value) if isinstance(value, float) else value


def _common(found: WhatIf) -> EngineOverrides:
    """What all points change alike."""
    return tuple(o for o in found.points[0].overrides if all(o in point.overrides for point in found.points))


def _name(found: WhatIf, point: WhatIfPoint) -> str:
    """What tells a point from the others; of the only one, all that it changes."""
    common = _common(found)
    return _written(tuple(o for o in point.overrides if o not in common) or point.overrides)


def _written(overrides: EngineOverrides) -> str:
    return " ".join(override_text(*override) for override in overrides)


def _changes(recorded: WhatIfPoint, changed: WhatIfPoint) -> dict[str, float | None] | None:
    if recorded.values is None or changed.values is None:
        return None
    return {name: relative_error(recorded.values[name], changed.values[name]) for name in _LABELS}


def _cell(point: WhatIfPoint, name: str) -> str:
    value = None if point.values is None else point.values[name]
    if value is None:
        return "-"
    if name == "preemptions":
        return f"{value:,.0f}"
    return f"{100 * value:.1f} %" if name == "kv_peak" else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
