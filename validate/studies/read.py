"""Studies from their YAML, read strictly: a study is data, and an unknown field is refused with its place."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from blis_replay.blis.release_fields import Fields
from blis_replay.validate.errors import StudyError, UnknownStudyError
from blis_replay.validate.studies.measurements import MEASUREMENTS, Measurement
from blis_replay.validate.studies.merge import merged
from blis_replay.validate.studies.study import VERDICTS, Check, Effect, EffectKind, Published, Run, Study, Verdict
from blis_replay.validate.studies.systems import SYSTEMS

SCHEMA = "blis-replay/study/1"
NO_SYSTEM = ""
_MOST_SEED = 2**32 - 1
# Effects and how many configurations each takes (0: at least two).
_EFFECTS: dict[EffectKind, int] = {
    "value": 1,
    "ratio": 2,
    "difference": 2,
    "largest": 0,
    "smallest": 0,
    "least_step": 0,
    "slope": 0,
    "r2": 0,
}


class StudyFields(Fields):
    """A mapping of a study that is being read."""

    document = "a study"
    error = StudyError


def study_names() -> list[str]:
    """The studies that ship, in the order of their names."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load_study(name: str) -> Study:
    """A study that ships, by its name.  Raises ``UnknownStudyError``, or ``StudyError`` if its file is unsound."""
    if name not in study_names():
        raise UnknownStudyError(f"no study is called {name}; `blis-replay study list` names them")
    return parse_study(_folder().joinpath(f"{name}.yaml").read_text("utf-8"), name)


def parse_study(text: str, name: str) -> Study:
    """Read a study from its YAML text.  Raises ``StudyError`` naming the field and what is wrong with it."""
    top = StudyFields.of_yaml(text, f"study {name}")
    if top.text("schema") != SCHEMA:
        top.refuse("schema", f"is not {SCHEMA!r}", "this program reads no other")
    measurement = MEASUREMENTS[top.choice("measurement", tuple(MEASUREMENTS))]
    systems = _systems(top, measurement)
    configurations = _configurations(top, measurement)
    published = top.mapping("published")
    recordings = _words(top, "recordings") if measurement.of_recordings else ()
    study = Study(
        name=name,
        title=top.text("title"),
        family=top.text("family"),
        hypothesis=top.text("hypothesis"),
        systems=systems,
        seeds=tuple(range(len(recordings))) if recordings else _seeds(top),
        configurations=configurations,
        shown=_shown(top, measurement),
        checks=_checks(top, "checks", configurations, measurement),
        evidence=_checks(top, "evidence", configurations, measurement) if "evidence" in top.values else (),
        source=published.text("source"),
        published=_published(published, systems),
        recorded=_recorded(top, systems),
        explanation=top.text("explanation", optional=True),
        recordings=recordings,
        library=measurement.library,
    )
    if not study.checks:
        top.refuse("checks", "is empty", "a verdict needs at least one")
    top.refuse_unknown()
    return study


def _folder() -> resources.abc.Traversable:
    return resources.files("blis_replay.validate.studies")


def _systems(top: StudyFields, measurement: Measurement) -> tuple[str, ...]:
    if not measurement.needs_system:
        return (NO_SYSTEM,)
    names = _words(top, "systems")
    for name in names:
        if name not in SYSTEMS:
            top.refuse("systems", f"names {name!r}", f"use some of {', '.join(SYSTEMS)}")
    return names


def _configurations(top: StudyFields, measurement: Measurement) -> dict[str, Run]:
    common, own = top.mapping("common", optional=True), top.mapping("configurations")
    runs = {}
    for name in own.values:
        fields = own.mapping(name, optional=True)
        runs[name] = measurement.read(StudyFields(merged(common.values, fields.values), top.origin, fields.path))
    if not runs:
        top.refuse("configurations", "is empty", "describe at least one")
    return runs


def _seeds(top: StudyFields) -> tuple[int, ...]:
    top.seen.add("seeds")
    values = top.values.get("seeds")
    if not isinstance(values, list) or not values or not all(_is_seed(value) for value in values):
        top.refuse("seeds", "is missing or no list of whole numbers", "write e.g. [42, 123, 456]")
    return tuple(values)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_SEED


def _shown(top: StudyFields, measurement: Measurement) -> tuple[str, ...]:
    names = _words(top, "shown")
    for name in names:
        _refuse_unknown_measure(top, "shown", name, measurement)
    return names


def _checks(
    top: StudyFields, name: str, configurations: Mapping[str, Run], measurement: Measurement
) -> tuple[Check, ...]:
    return tuple(_check(fields, configurations, measurement) for fields in top.list(name))


def _check(fields: Fields, configurations: Mapping[str, Run], measurement: Measurement) -> Check:
    kinds = [kind for kind in _EFFECTS if kind in fields.values]
    if len(kinds) != 1:
        fields.refuse("says", "stands beside no effect, or beside several", f"name one of {', '.join(_EFFECTS)}")
    check = Check(
        says=fields.text("says"),
        effect=_effect(fields.mapping(kinds[0]), kinds[0], configurations, measurement),
        least=fields.number("least") if "least" in fields.values else None,
        most=fields.number("most") if "most" in fields.values else None,
        systems=_words(fields, "systems") if "systems" in fields.values else (),
    )
    if check.least is None and check.most is None:
        fields.refuse("least", "and most are both missing", "say where the effect has to be")
    fields.refuse_unknown()
    return check


def _effect(fields: Fields, kind: EffectKind, configurations: Mapping[str, Run], measurement: Measurement) -> Effect:
    measure = fields.text("measure")
    _refuse_unknown_measure(fields, "measure", measure, measurement)
    at: tuple[float, ...] = ()
    if kind in ("slope", "r2"):
        places = fields.mapping("over").numbers()
        chosen, at = tuple(places), tuple(places.values())
    elif _EFFECTS[kind] == 0:
        chosen = tuple(configurations) if fields.values.get("over") == "all" else _words(fields, "over")
        fields.seen.add("over")
    else:
        chosen = (fields.text("of"), fields.text("to")) if _EFFECTS[kind] == 2 else (fields.text("of"),)
    for name in chosen:
        if name not in configurations:
            fields.refuse("over" if "over" in fields.values else "of", f"names {name!r}", "name configurations")
    if kind in ("slope", "r2", "least_step") and len(chosen) < 2:
        fields.refuse("over", "names fewer than two", "a line needs two configurations")
    fields.refuse_unknown()
    return Effect(kind, measure, chosen, at)


def _refuse_unknown_measure(fields: Fields, field: str, name: str, measurement: Measurement) -> None:
    if name not in measurement.measures:
        fields.refuse(field, f"names {name!r}", f"this measurement gives {', '.join(measurement.measures)}")


def _published(fields: StudyFields, systems: tuple[str, ...]) -> dict[str, Published]:
    outcomes = {}
    by_system = fields.mapping("outcomes", optional=True)
    for name in by_system.values:
        if name not in systems and name != "all":
            by_system.refuse(name, "is no system of this study", f"use all, or some of {', '.join(systems)}")
        outcome = by_system.mapping(name)
        verdict = outcome.choice("verdict", VERDICTS) if "verdict" in outcome.values else None
        outcomes[name] = Published(verdict, outcome.text("figures"))
        outcome.refuse_unknown()
    fields.refuse_unknown()
    every = outcomes.pop("all", None)
    return outcomes if every is None else {**dict.fromkeys(systems, every), **outcomes}


def _recorded(top: StudyFields, systems: tuple[str, ...]) -> dict[str, Verdict]:
    if isinstance(top.values.get("recorded"), str):
        return dict.fromkeys(systems, top.choice("recorded", VERDICTS))
    fields = top.mapping("recorded")
    recorded = {name: fields.choice(name, VERDICTS) for name in systems}
    fields.refuse_unknown()
    return recorded


def _words(fields: Fields, name: str) -> tuple[str, ...]:
    fields.seen.add(name)
    values = fields.values.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        fields.refuse(name, "is missing or no list of words", "write e.g. [a, b]")
    return tuple(values)
