"""A history laid out: a line per experiment and number, what went beyond its limit when, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isfinite

from blis_replay.base.errors import ValidateError, counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.bounds import Bound
from blis_replay.validate.comparison.overview import toned_error
from blis_replay.validate.comparison.verdict_text import toned
from blis_replay.validate.history import Entry, History, Moved, Series, Stretch
from blis_replay.validate.judgement import Verdict, exit_code, worst
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import limit_text, percent, percent_span

# Commits that are drawn in a line; more are in the report.
_SHOWN = 20
_MARKS = {"within": ".", "undecided": "?", "beyond": "X", "absent": "-"}
_COLUMNS = (
    *(Column("", "text"), Column("", "text"), Column("now", "error_brief"), Column("95 % interval", "word")),
    *(Column("limit", "word"), Column("oldest to newest", "text")),
)
_LEGEND = (
    "95 %: for another recording of the load; last {}: . within, ? undecided, X beyond its limit, - not judged, "
    "blank not recorded"
)
_DATA_COLUMNS = (
    *columns_named(
        "experiment", "simulator", "release", "replay", "metric", "statistic", "commit", "date", kind="data"
    ),
    *columns_named("verdict", "state", kind="data"),
    *columns_named("error", "low", "high", "limit", kind="real"),
)


def history_answer(file: str, history: History, bounds: Sequence[Bound] = ()) -> Answer:
    """The page, the document, and a row per line of the history.

    ``bounds``: of the size of an error since it was smallest; without any the exit code is 0, whatever happened.
    Raises ``ValidateError`` for a bound that no number of the history has.
    """
    bounded = [_held(history, bound) for bound in bounds]
    judged = [
        Line(f"beyond its limit: {_of(one)} {_stretch_text(of)}", mark=Toned("beyond its limit:", "bad"))
        for one in history.series
        if one.newest.judged
        for of in one.beyond()
    ]
    changed = [line for one in history.series for line in _changed_lines(one)]
    verdicts: list[Verdict] = [verdict for verdict, _ in bounded]
    parts: list[Part] = [
        Block([*(line for _, lines in bounded for line in lines), _head(file, history)]),
        _table(history, all_of=False),
        Block(judged),
        Block(changed, "changes of an error (E-divisive, 1 % false alarms per number)" if changed else ""),
    ]
    whole = [parts[0], _table(history, all_of=True), *parts[2:]]
    rows = [_row(entry) for one in history.series for entry in one.entries]
    document = {
        "file": file,
        "commits": [{"commit": c.commit, "date": c.date.isoformat(), "dirty": c.dirty} for c in history.commits],
        "bounds": [{"bound": b.text, "name": b.name, "verdict": v} for b, (v, _) in zip(bounds, bounded, strict=True)],
        "series": [_document(one) for one in history.series],
    }
    code = exit_code(verdicts) if verdicts else 0
    return Answer(whole, document, Table("", _DATA_COLUMNS, rows), code, brief=parts)


def _head(file: str, history: History) -> Line:
    newest = history.commits[-1]
    of_newest = [one.newest for one in history.series if one.newest.of == newest]
    verdicts = [entry.verdict for entry in of_newest if entry.judged]
    verdicts += ["NOT JUDGED" for of in history.not_judged.values() if newest in of]
    now = worst(verdicts)
    return Line(f"{now}  {file}: {counted(len(history.commits), 'commit')}, the last {newest.short}", mark=toned(now))


def _table(history: History, *, all_of: bool) -> Table:
    """A row per number, of tails only in ``all_of``; an experiment is named once."""
    rows: list[list[Cell]] = []
    before: tuple[str, ...] = ()
    shown = [one for one in history.series if all_of or one.newest.judged]
    several = len({one.newest.key[1:4] for one in shown}) > 1
    for one in shown:
        newest = one.newest
        of = (newest.alias, *(newest.key[1:4] if several else ()))
        interval = None if newest.interval is None else percent_span(*newest.interval)
        limit = None if newest.limit is None else limit_text(newest.limit)
        now = toned_error(newest.error, newest.state)
        rows.append([", ".join(of) if of != before else "", newest.name, now, interval, limit, _strip(history, one)])
        before = of
    count = counted(min(_SHOWN, len(history.commits)), "commit")
    return Table("", _COLUMNS, rows, note=_LEGEND.format(count))


def _strip(history: History, series: Series) -> str:
    marks = {entry.of: _MARKS[entry.state] for entry in series.entries}
    missing = history.not_judged.get((series.newest.experiment, series.newest.simulator), ())
    marks |= dict.fromkeys(missing, "-")
    return "".join(marks.get(commit, " ") for commit in history.commits[-_SHOWN:])


def _of(series: Series) -> str:
    return f"{series.newest.alias} {series.newest.name}"


def _stretch_text(one: Stretch) -> str:
    since = f"since {one.first.short}" + (f", after {one.after.short}" if one.after else ", the first one recorded")
    until = f"; no longer at {one.fixed.short}" if one.fixed else "; still so"
    return f"{since}; {counted(one.commits, 'commit')}{until}"


# So many changes in a row in one direction are a drift: change points cut it into steps.
_DRIFT = 3


def _changed_lines(series: Series) -> list[Line]:
    lines = []
    for _, group in groupby(series.moved, lambda one: one.change.after > one.change.before):
        steps = list(group)
        if len(steps) < _DRIFT:
            lines += [Line(f"{_of(series)}: {moved_text(one)}") for one in steps]
            continue
        first, last = steps[0], steps[-1]
        change = f"{percent(first.change.before)} to {percent(last.change.after)}"
        between = f"{first.after.short} and {last.latest.short}"
        lines.append(Line(f"{_of(series)}: drifts from {change} between {between}, in {len(steps)} steps"))
    return lines


def moved_text(one: Moved) -> str:
    """The change, its commits, and what else changed there."""
    between = f"{one.after.short} and {one.first.short}"
    if one.earliest != one.latest:
        between += f" (95 %: first at {one.earliest.short} to {one.latest.short})"
    also = f"; there also changed {', '.join(one.also)}" if one.also else ""
    return f"{percent(one.change.before)} to {percent(one.change.after)} between {between}{also}"


def _held(history: History, bound: Bound) -> tuple[Verdict, list[Line]]:
    """A bound held against every number that it is of."""
    if not isfinite(bound.high):
        raise ValidateError(f"{bound.name} {bound.text}: in a history an error may only grow; write e.g. +2%")
    found = [one for one in history.series if (one.newest.metric, one.newest.statistic) == bound.cell and one.known]
    if not found:
        raise ValidateError(f"the history has no {bound.name}; leave that bound out")
    lines, most = [], f"{100 * bound.high:.4g}"
    for one in found:
        grown = one.grown()
        if grown is not None and grown[0] > bound.high:
            by, moved = grown
            said = f"FAIL  {_of(one)}: |error| grew by {100 * by:.1f} points, at most {most}: {moved_text(moved)}"
            lines.append(Line(said, mark=toned("FAIL")))
    if lines:
        return "FAIL", lines
    said = f"PASS  {bound.name}: no |error| grew by more than {most} points"
    return "PASS", [Line(said, mark=toned("PASS"))]


def _row(entry: Entry) -> list[Cell]:
    return [
        *entry.key,
        *(entry.commit, entry.date.isoformat(), entry.verdict, entry.state),
        *(entry.error, *(entry.interval or (None, None)), entry.limit),
    ]


def _document(series: Series) -> dict[str, object]:
    def ids(one: Stretch | Moved, *names: str) -> dict[str, object]:
        commits = {name: getattr(one, name) for name in names}
        return {name: commit and commit.commit for name, commit in commits.items()}

    names = ("experiment", "simulator", "release", "replay", "metric", "statistic")
    of_point = ("commit", "verdict", "state", "error", "interval", "limit")
    return {
        **dict(zip(names, series.newest.key, strict=True)),
        "alias": series.newest.alias,
        "judged": series.newest.judged,
        "points": [{name: getattr(entry, name) for name in of_point} for entry in series.entries],
        "beyond": [ids(one, "first", "last", "after", "fixed") for one in series.beyond()],
        "changes": [
            {
                **ids(one, "after", "first", "earliest", "latest"),
                "error_before": one.change.before,
                "error_after": one.change.after,
                "also": list(one.also),
            }
            for one in series.moved
        ],
    }
