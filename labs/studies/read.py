"""Studies from their YAML, read strictly: a study is data, and an unknown field is refused with its place.

``MEASUREMENTS`` says what a configuration of a study can be: each measurement has a type of settings, and says what
it measures.  A new one is a line there; studies of any kind share reading, judging and printing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Annotated, Any, Literal, get_args

import yaml
from msgspec import Meta, Struct

from blis_replay.base.document import FieldError, Number, Text, read_values, yaml_values
from blis_replay.validate.errors import StudyError, UnknownStudyError
from blis_replay_labs.studies import cluster as cluster_run
from blis_replay_labs.studies.study import SYSTEMS, Check, Effect, EffectKind, Published, Run, Study, Verdict
from blis_replay_labs.synthetic.workload import Seed


@dataclass(frozen=True)
class Measurement:
    """``settings``: the type of a configuration; ``run``: measures it; ``measures``: the names that a run gives."""

    settings: type[Any]
    run: Callable[..., Mapping[str, float]]
    measures: tuple[str, ...]


MEASUREMENTS = {
    "cluster": Measurement(cluster_run.ClusterRun, cluster_run.run, cluster_run.MEASURES),
    "single queue": Measurement(cluster_run.QueueRun, cluster_run.run_queue, cluster_run.QUEUE_MEASURES),
}


# A mapping with one of these keys replaces another as a whole: its parameters belong to its kind.
_KINDS = ("kind", "process", "distribution")


def merged(common: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """The common settings, overridden mapping by mapping by ``own``; None removes a setting."""
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


Words = Annotated[tuple[Text, ...], Meta(min_length=1)]


class _Of(Struct, frozen=True):
    measure: Text
    of: Text


class _OfTo(_Of, frozen=True):
    to: Text


class _Over(Struct, frozen=True):
    measure: Text
    over: Literal["all"] | Words


class _Along(Struct, frozen=True):
    measure: Text
    over: dict[str, Number]


class _CheckText(Struct, frozen=True, kw_only=True):
    says: Text
    value: _Of | None = None
    ratio: _OfTo | None = None
    difference: _OfTo | None = None
    largest: _Over | None = None
    least_step: _Over | None = None
    slope: _Along | None = None
    r2: _Along | None = None
    least: Number | None = None
    most: Number | None = None
    systems: Words | None = None

    def __post_init__(self) -> None:
        if len([kind for kind in _EFFECTS if getattr(self, kind)]) != 1:
            raise FieldError("says", "stands beside no effect, or beside several", f"name one of {', '.join(_EFFECTS)}")
        if self.least is None and self.most is None:
            raise FieldError("least", "and most are both missing", "say where the effect has to be")


_EFFECTS: tuple[EffectKind, ...] = get_args(EffectKind)


class _OutcomeText(Struct, frozen=True):
    figures: Text
    verdict: Verdict | None = None


class _PublishedText(Struct, frozen=True):
    source: Text
    outcomes: dict[str, _OutcomeText] = {}


class _StudyText(Struct, frozen=True, kw_only=True):
    schema: Literal["blis-replay/study/1"]
    title: Text
    family: Text
    hypothesis: Text
    measurement: Literal["cluster", "single queue"]
    systems: Words
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)]
    common: dict[str, Any] = {}
    configurations: Annotated[dict[str, dict[str, Any] | None], Meta(min_length=1)]
    shown: Words
    checks: Annotated[tuple[_CheckText, ...], Meta(min_length=1)]
    evidence: tuple[_CheckText, ...] = ()
    published: _PublishedText
    recorded: Verdict | dict[str, Verdict]
    explanation: str = ""


def study_names() -> list[str]:
    """The studies that ship, in the order of their names."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load_study(name: str) -> Study:
    """A study that ships, by its name.  Raises ``UnknownStudyError``, or ``StudyError`` if its file is unsound."""
    if name not in study_names():
        raise UnknownStudyError(f"no study is called {name or repr(name)}; `blis-replay study list` names them")
    return parse_study(_folder().joinpath(f"{name}.yaml").read_text("utf-8"), name)


def parse_study(text: str, name: str) -> Study:
    """Read a study from its YAML text.  Raises ``StudyError`` naming the field and what is wrong with it."""
    origin = f"study {name}"
    # Only studies of ours are read: aliases are welcome.
    given = read_values(
        yaml_values(text, origin, StudyError, yaml.safe_load), _StudyText, origin, "a study", StudyError
    )
    measurement = MEASUREMENTS[given.measurement]
    runs: dict[str, Run] = {}
    for configuration, own in given.configurations.items():
        settings = merged(given.common, own or {})
        at = f"configurations.{configuration}"
        described = read_values(settings, measurement.settings, origin, "a study", StudyError, at)
        runs[configuration] = partial(measurement.run, described)
    try:
        return _study(name, given, measurement, runs)
    except FieldError as error:
        raise StudyError(f"{origin}, {error}") from None


def _study(name: str, given: _StudyText, measurement: Measurement, runs: Mapping[str, Run]) -> Study:
    """What the text says, where it names what there is."""
    systems = given.systems
    _known("systems", systems, SYSTEMS)
    _known("shown", given.shown, measurement.measures)
    outcomes = {system: Published(one.verdict, one.figures) for system, one in given.published.outcomes.items()}
    _known("published.outcomes", outcomes, (*systems, "all"))
    every = outcomes.pop("all", None)
    recorded = dict.fromkeys(systems, given.recorded) if isinstance(given.recorded, str) else given.recorded
    _known("recorded", recorded, systems)
    for system in systems:
        if system not in recorded:
            raise FieldError(f"recorded.{system}", "is missing", "add its verdict")
    return Study(
        name=name,
        title=given.title,
        family=given.family,
        hypothesis=given.hypothesis,
        systems=systems,
        seeds=given.seeds,
        configurations=runs,
        shown=given.shown,
        checks=tuple(_check(f"checks[{i}]", one, runs, measurement) for i, one in enumerate(given.checks)),
        evidence=tuple(_check(f"evidence[{i}]", one, runs, measurement) for i, one in enumerate(given.evidence)),
        source=given.published.source,
        published=outcomes if every is None else {**dict.fromkeys(systems, every), **outcomes},
        recorded=recorded,
        explanation=given.explanation,
    )


def _known(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise FieldError(field, f"names {name!r}", f"use some of {', '.join(known)}")


def _check(place: str, given: _CheckText, runs: Mapping[str, Run], measurement: Measurement) -> Check:
    kind = next(kind for kind in _EFFECTS if getattr(given, kind))
    effect: _Of | _OfTo | _Over | _Along = getattr(given, kind)
    _known(f"{place}.{kind}.measure", [effect.measure], measurement.measures)
    at: tuple[float, ...] = ()
    if isinstance(effect, _Of):
        chosen: tuple[str, ...] = (effect.of, effect.to) if isinstance(effect, _OfTo) else (effect.of,)
    else:
        chosen = tuple(runs if effect.over == "all" else effect.over)
        at = tuple(effect.over.values()) if isinstance(effect, _Along) else ()
        if kind in ("slope", "r2", "least_step") and len(chosen) < 2:
            raise FieldError(f"{place}.{kind}.over", "names fewer than two", "a line needs two configurations")
    _known(f"{place}.{kind}.{'of' if isinstance(effect, _Of) else 'over'}", chosen, runs)
    return Check(given.says, Effect(kind, effect.measure, chosen, at), given.least, given.most, given.systems or ())


def _folder() -> resources.abc.Traversable:
    return resources.files("blis_replay_labs.studies")
