"""The history of a simulator: its judgements, commit by commit, in a file of JSON lines beside its source.

One line per commit, experiment and number, with the commit's own date: a run that is repeated writes the same line, and
two branches merge as a union of lines (``merge=union`` in ``.gitattributes``).  Lines are read in order of date; only
commits of one second stand as in the file.  Changed files on top of a commit count as one further commit after it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from blis_replay.base.errors import ValidateError, printable
from blis_replay.validate.judgement import Judgement, Quantity, State, Verdict
from blis_replay.validate.metrics.change_points import Change, changes

Key = tuple[str, ...]


@dataclass(frozen=True)
class Commit:
    """What was judged: the commit (empty outside a repository), its date, and whether tracked files differ."""

    commit: str
    date: datetime
    dirty: bool = False

    @property
    def short(self) -> str:
        """Eight digits with the day; ``+``: other files than those of the commit."""
        return f"{self.commit[:8] or 'no commit'}{'+' * self.dirty} ({self.date:%Y-%m-%d})"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One number at one commit; a line of the file.

    ``recording``, ``release_hash``: SHA-256 of the data and of the coefficients; ``program``: version of blis-replay.
    ``metric``: empty where the experiment has no number that is judged.  ``judged``: whether the verdict rests on it;
    else it is a tail.  Errors are fractions; NOT JUDGED has no error.
    """

    schema: Literal["blis-replay/history/1"] = "blis-replay/history/1"
    commit: str
    date: datetime
    dirty: bool
    experiment: str
    alias: str
    simulator: str
    verdict: Verdict
    recording: str = ""
    requests: int = 0
    release: str = ""
    release_hash: str = ""
    replay: str = ""
    program: str = ""
    metric: str = ""
    statistic: str = ""
    name: str = ""
    error: float | None = None
    interval: tuple[float, float] | None = None
    limit: float | None = None
    state: State = "absent"
    judged: bool = False

    @property
    def key(self) -> Key:
        """What stays the same from commit to commit."""
        return (self.experiment, self.simulator, self.release, self.replay, self.metric, self.statistic)

    @property
    def of(self) -> Commit:
        """The commit."""
        return Commit(self.commit, self.date, self.dirty)


def commit_here(history: Path) -> Commit:
    """The commit of the repository of the working directory; without one, no commit and the time of now.

    The history itself may differ from the commit.
    """

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603, S607 (constants)
        return found.stdout

    try:
        commit, date = git("log", "-1", "--format=%H %cI").split()
        root = Path(git("rev-parse", "--show-toplevel").removesuffix("\n"))
        changed = git("status", "--porcelain", "--untracked-files=no", "--no-renames", "-z").split("\0")
    except (OSError, ValueError, subprocess.SubprocessError):
        return Commit("", datetime.now(UTC).replace(microsecond=0))
    dirty = any(root / name[3:] != history.resolve() for name in changed if name)
    return Commit(commit, datetime.fromisoformat(date), dirty)


def entries_of(judgement: Judgement, commit: Commit, verdict: Verdict) -> list[Entry]:
    """The lines of a judgement; ``verdict``: its own, or that of a gate, which judged more."""
    subject = judgement.subject
    begins, ends = subject.window
    part = "" if (begins, ends) == (0.0, 1.0) else f", window {begins:g}:{ends:g}"
    whole = msgspec.structs.replace(
        without_number(subject.slug, subject.simulator, commit),
        alias=subject.alias,
        verdict=verdict,
        recording=subject.recording,
        requests=subject.requests,
        release=subject.release,
        release_hash=subject.release_hash,
        replay=subject.replay + part,
    )
    if judgement.verdict == "NOT JUDGED":
        return [whole]
    tails = () if judgement.overloaded else judgement.tails
    found = [_entry(whole, one, judged=True) for one in judgement.judged]
    return [*found, *(_entry(whole, one, judged=False) for one in tails if one.error is not None)]


def without_number(experiment: str, simulator: str, commit: Commit) -> Entry:
    """The line of an experiment that carries no verdict."""
    return Entry(
        commit=commit.commit,
        date=commit.date,
        dirty=commit.dirty,
        experiment=experiment,
        alias=experiment,
        simulator=simulator,
        verdict="NOT JUDGED",
        program=version("blis-replay"),
    )


def _entry(whole: Entry, one: Quantity, *, judged: bool) -> Entry:
    return msgspec.structs.replace(
        whole,
        metric=one.key,
        statistic=one.statistic,
        name=one.name,
        error=None if one.error is None else round(one.error, 6),
        interval=one.interval and (round(one.interval[0], 6), round(one.interval[1], 6)),
        limit=one.limit,
        state=one.state,
        judged=judged,
    )


def record(path: Path, judged: Iterable[tuple[Judgement, Verdict]], without: Iterable[str], simulator: str) -> None:
    """Add judgements at the commit of the working directory to a history, and experiments that carry no verdict.

    Raises as ``append``.
    """
    commit = commit_here(path)
    entries = [entry for judgement, verdict in judged for entry in entries_of(judgement, commit, verdict)]
    append(path, [*entries, *(without_number(name, simulator, commit) for name in without)])


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Add lines to a history, created if missing; lines already in it are skipped.

    Raises ``ValidateError`` for a file that is not a history, ``OSError`` for one that cannot be written.
    """
    before = set(read(path)) if path.exists() else set()
    new = [entry for entry in entries if entry not in before]
    lines = b"".join(msgspec.json.encode(entry, order="sorted") + b"\n" for entry in new)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = (b"" if file.read(1) == b"\n" else b"\n") + lines
        file.write(lines)  # all at once: the file is open to append


def read(path: Path) -> list[Entry]:
    """The lines of a history, oldest first, each once; of one commit and number the last line counts.

    Raises ``ValidateError`` for an invalid line, ``OSError`` for a file that cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValidateError(f"{path} is not a file; name one")  # a device may have no end
    found: dict[tuple[str, ...], Entry] = {}
    decoder = msgspec.json.Decoder(Entry)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = "remove it"
            if line[:7] in _MARKERS:
                remedy = "resolve the merge, and set merge=union in .gitattributes"
            elif b"blis-replay/history/" in line and "$.schema" in str(error):
                remedy = "another version of blis-replay wrote it; use that one"
            what = printable(str(error))
            raise ValidateError(f"{path}: line {number} cannot be read ({what}); {remedy}") from None
        if entry.date.tzinfo is None:
            raise ValidateError(f"{path}: line {number}: the date has no time zone; write e.g. 2026-11-20T12:00:00Z")
        at = (entry.commit or entry.date.isoformat()) + "+" * entry.dirty
        found.pop((at, *entry.key), None)
        found[at, *entry.key] = entry
    return sorted(found.values(), key=lambda entry: (entry.date, entry.dirty))


_MARKERS = (b"<<<<<<<", b"=======", b">>>>>>>")


@dataclass(frozen=True)
class Stretch:
    """Commits in a row at which a number is beyond its limit.

    ``after``: the last commit before them within the limit, or None.  ``fixed``: the first after them.
    """

    first: Commit
    last: Commit
    after: Commit | None
    fixed: Commit | None
    commits: int


@dataclass(frozen=True)
class Moved:
    """A change of an error: between ``after`` and ``first``; at 95 % not before ``earliest`` and not after ``latest``.

    ``change``: with places in the series.  ``also``: what else changed there.
    """

    change: Change
    after: Commit
    first: Commit
    earliest: Commit
    latest: Commit
    also: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """One number of one experiment, commit by commit."""

    entries: tuple[Entry, ...]

    @property
    def newest(self) -> Entry:
        """At the last commit that has it."""
        return self.entries[-1]

    @property
    def known(self) -> tuple[Entry, ...]:
        """Those with an error."""
        return tuple(entry for entry in self.entries if entry.error is not None)

    @property
    def errors(self) -> list[float]:
        """Of ``known``."""
        return [entry.error or 0.0 for entry in self.known]

    def beyond(self) -> list[Stretch]:
        """Where it is beyond its limit."""
        groups = [(state, list(of)) for state, of in groupby(self.entries, lambda entry: entry.state == "beyond")]
        return [
            Stretch(
                of[0].of,
                of[-1].of,
                groups[i - 1][1][-1].of if i else None,
                groups[i + 1][1][0].of if i + 1 < len(groups) else None,
                len(of),
            )
            for i, (is_beyond, of) in enumerate(groups)
            if is_beyond
        ]

    @cached_property
    def moved(self) -> list[Moved]:
        """Where its error changed, by change points."""
        known = self.known

        def moved(one: Change) -> Moved:
            before, first = known[one.at - 1], known[one.at]
            also = tuple(what for field, what in _ALSO.items() if getattr(before, field) != getattr(first, field))
            return Moved(one, before.of, first.of, known[one.earliest].of, known[one.latest].of, also)

        return [moved(one) for one in changes(self.errors)]

    def grown(self) -> tuple[float, Moved] | None:
        """By how much the size of the error grew since it was smallest, and the change that began it; None if not."""
        moved = self.moved
        if not moved:
            return None
        sizes = [abs(moved[0].change.before), *(abs(one.change.after) for one in moved)]
        best = min(range(len(sizes)), key=sizes.__getitem__)
        return None if best == len(moved) else (sizes[-1] - sizes[best], moved[best])


_ALSO = {"recording": "the recording", "release_hash": "the coefficients", "program": "blis-replay"}


@dataclass(frozen=True)
class History:
    """``commits``: all, oldest first.  ``series``: by experiment and number.

    ``not_judged``: commits by experiment and simulator.
    """

    commits: tuple[Commit, ...]
    series: tuple[Series, ...]
    not_judged: Mapping[tuple[str, str], tuple[Commit, ...]]


def history_of(entries: Sequence[Entry], experiments: Sequence[str] = ()) -> History:
    """What the lines say of these experiments (slugs, aliases or patterns), of all without any.

    Raises ``ValidateError`` for an experiment without lines, or an empty history.
    """
    if not entries:
        raise ValidateError("the history has no line; add some with `validate --record FILE`")

    def named(entry: Entry, names: Sequence[str]) -> bool:
        return any(fnmatchcase(of, name) for of in (entry.experiment, entry.alias) for name in names)

    for name in experiments:
        if not any(named(entry, [name]) for entry in entries):
            known = ", ".join(sorted({entry.alias for entry in entries}))
            raise ValidateError(f"the history has nothing of {name}; it has: {known}")
    chosen = [entry for entry in entries if not experiments or named(entry, experiments)]
    by_key: dict[Key, list[Entry]] = {}
    not_judged: dict[tuple[str, str], list[Commit]] = {}
    for entry in chosen:
        if entry.metric:
            by_key.setdefault(entry.key, []).append(entry)
        else:
            not_judged.setdefault((entry.experiment, entry.simulator), []).append(entry.of)
    series = [Series(tuple(of)) for of in by_key.values()]
    series.sort(key=lambda one: (one.newest.alias, not one.newest.judged))
    commits = tuple(dict.fromkeys(entry.of for entry in chosen))
    return History(commits, tuple(series), {key: tuple(of) for key, of in not_judged.items()})
