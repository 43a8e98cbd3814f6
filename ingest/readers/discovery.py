"""Which files belong to a recording, and which of them are which.

Small configuration files are known by name and place.  Everything else is known by what is
in it: a file may be called as its owner likes, and may be compressed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

import msgspec

from blis_replay.base.addons import in_labs
from blis_replay.base.errors import RecordingError, printable
from blis_replay.ingest.readers.documents import text
from blis_replay.ingest.readers.files import HEAD_BYTES, Progress, RecordedFile
from blis_replay.ingest.readers.formats import (
    SERVER_LOG,
    STAGE,
    TABLE,
    file_kinds,
    given_columns,
    input_formats,
    labs_formats,
    request_formats,
)
from blis_replay.ingest.readers.tables.columns import EXAMPLE, HOW_TO_SAY, listed
from blis_replay.ingest.readers.tables.records import first_record, may_have
from blis_replay.ingest.recording import SourceFile

MAX_FILES = 10_000
MAX_UNKNOWN_HASHED_BYTES = 1 << 30

# Of a result's name, its form and how it is packed.
_ENDINGS = re.compile(r"(?:\.[a-z]{2,7}){1,2}$")
# A rotated log, and how often it was.
_ROTATED = re.compile(r"(.*?)(?:\.(\d{1,6}))?(?:\.gz|\.zst)?")


@dataclass(frozen=True)
class Part:
    """Which requests of a recording are meant: by send, us from the first one; by client's file; by load stage.

    ``until_us`` itself is not in it.  None: no bound.
    """

    from_us: int | None = None
    until_us: int | None = None
    client: str | None = None
    stage: int | None = None

    def name(self) -> str:
        """What is put behind the name of the recording."""
        begin, end = (None if us is None else f"{Decimal(us) / 1_000_000:f}s" for us in (self.from_us, self.until_us))
        client = self.client and _ENDINGS.sub("", self.client).replace("/", "-")
        stage = None if self.stage is None else f"stage-{self.stage}"
        times = f"{begin or '0s'}-{end or 'end'}" if begin or end else None
        return "-".join(filter(None, (client, stage, times)))


@dataclass(frozen=True)
class Source:
    """What is read as one recording: a directory with all in it, or the files named (``paths``).

    ``form``: the format of its data files; empty: by their content.  ``columns`` and ``model``: as the options state
    them, or None.  ``point``: the level of a table of load levels, from 1; 0 without levels.  ``left_out``: what lies
    beside the experiments of a directory and is not read, noted with the first of them.  ``alone``: it is all that was
    named.  ``part``: the requests that are meant, of all clients; None: all, of the first client's file.
    """

    slug: str
    root: Path
    paths: tuple[Path, ...] | None = None
    form: str = ""
    columns: str | None = None
    model: str | None = None
    point: int = 0
    left_out: tuple[str, ...] = field(default=(), compare=False)
    alone: bool = field(default=True, compare=False)
    part: Part | None = None

    def given(self) -> tuple[SourceFile, ...]:
        """What the user says of this recording, kept among its files: a later ingest finds it there."""
        part = msgspec.json.encode(self.part).decode() if self.part else None
        point = str(self.point) if self.point else None
        said = {"--columns": self.columns, "--model": self.model, "point": point, "part": part}
        return tuple(
            SourceFile(option, f"{GIVEN_KIND}{given}", len(given), hashlib.sha256(given.encode()).hexdigest())
            for option, given in said.items()
            if given
        )

    def as_before(self, stored: Iterable[tuple[str, str]]) -> Source:
        """The source with what was said of it at an earlier ingest and is not now; ``stored``: names and kinds."""
        said = {name: kind.removeprefix(GIVEN_KIND) for name, kind in stored if kind.startswith(GIVEN_KIND)}
        return replace(
            self,
            columns=said.get("--columns") if self.columns is None else self.columns,
            model=said.get("--model") if self.model is None else self.model,
            part=msgspec.json.decode(said["part"], type=Part) if self.part is None and "part" in said else self.part,
        )


GIVEN_KIND = "given: "


def sources_of(
    named: Sequence[str | Path],
    *,
    slug: str = "",
    form: str = "",
    columns: str | None = None,
    model: str | None = None,
    part: Part | None = None,
    one: bool = False,
) -> list[Source]:
    """The recordings that directories, files and patterns (``runs/*.json``) on a command line stand for.

    A directory is one recording, or stands for several that have an ``exp-config.yaml`` or a load generator's result
    each.  Files of one folder (with its ``results`` or ``reports``) are one, called like the folder.  A table of load
    levels stands for a recording of each.  ``slug``: the name of the only one.  ``one``: a directory is always one.
    Raises :class:`RecordingError` where two would have one name.
    """
    sources: list[Source] = []
    files: dict[Path, list[Path]] = {}
    for path in _expanded(named):
        if path.is_file():
            folder = _recording_folder(Path(os.path.realpath(path)).parent)
            if folder not in files:
                sources.append(Source(folder.name, folder, (), form))
            files.setdefault(folder, []).append(path)
        else:
            # A loop of links is kept as it is, and is then no directory.
            root = Path(os.path.realpath(path))
            folders = [root] if one else _experiments_in(root, columns or "")
            left_out = () if folders == [root] else tuple(_left_out(root, folders, columns or ""))
            sources += [
                Source(folder.name, folder, None, form, left_out=() if place else left_out, alone=folders == [root])
                for place, folder in enumerate(folders)
            ]
    if form and any(source.paths is None for source in sources):
        problem = "a format is given to files, and here is a directory"
        raise RecordingError(f"--input-format {form}", "", problem, "name the files in it")
    if taken := [sign for sign in "/*?[" if sign in slug]:
        problem = f"a name with {taken[0]} in it is taken for a {'path' if '/' in taken else 'pattern'}"
        raise RecordingError(f"--name {slug}", "", problem, "give one without")
    given_columns(columns or "")
    model = model if model is None else text(model) or ""
    whole = [
        replace(s, paths=None if s.paths is None else tuple(files[s.root]), columns=columns, model=model, part=part)
        for s in dict.fromkeys(sources)
    ]
    if slug and len(whole) != 1:
        raise RecordingError(f"--name {slug}", "", f"one name for {len(whole)} recordings", "ingest them one by one")
    named_as = part.name() if part else ""
    chosen = [replace(s, slug=slug or "-".join(filter(None, (s.slug, named_as)))) for s in whole]
    return _of_different_names([point for source in chosen for point in _points_of(source)])


def only_source(path: str | Path) -> Source:
    """The one recording that a path stands for; :class:`RecordingError` if it stands for several."""
    sources = sources_of([path])
    if len(sources) != 1:
        names = ", ".join(source.slug for source in sources[:3])
        raise RecordingError(path, "", f"{len(sources)} recordings ({names}, ...)", "ingest them one by one")
    return sources[0]


def _points_of(source: Source) -> list[Source]:
    """A recording for each load level, of a table that has several and is alone."""
    if source.paths is None or len(source.paths) != 1:
        return [source]
    file = RecordedFile(source.paths[0], printable(source.paths[0].name), columns=source.columns or "")
    levels = next((f.levels for f in request_formats() if f.levels and f.name == _kind_of(file, source.form)), None)
    names = levels(file) if levels and file.path.is_file() else []
    if len(names) < 2:
        return [source]
    named = (f"{source.slug}-{name or point}" for point, name in enumerate(names, 1))
    return [replace(source, slug=slug, point=point) for point, slug in enumerate(named, 1)]


def _of_different_names(sources: list[Source]) -> list[Source]:
    first: dict[str, Source] = {}
    for source in sources:
        other = first.setdefault(source.slug, source)
        if other is not source:
            problem = f"it has the name of {printable(str(other.root))}, and would take its place"
            raise RecordingError(source.root, "", problem, "ingest them one by one, each with a --name")
    return sources


def find(source: Source, progress: Progress | None) -> tuple[dict[str, list[RecordedFile]], tuple[SourceFile, ...]]:
    """The known files of a recording by kind (``formats.file_kinds``), in the order of their names, and the others.

    Without a part, of each format of requests the first file is read, and the others are counted.
    Raises :class:`RecordingError` for a missing directory, and for a name that cannot be that of an experiment.
    """
    if not source.slug or printable(source.slug) != source.slug:
        problem = "its name becomes the name of the experiment, and is not plain text"
        raise RecordingError(source.root, "", problem, "rename the directory")
    known: dict[str, list[RecordedFile]] = {}
    others: list[SourceFile] = []
    forms = {form.name for form in request_formats()}
    files: list[tuple[str, RecordedFile]] = []
    for path in _walk(source.root) if source.paths is None else source.paths:
        # A name that is not text, or that a terminal would obey, is kept in a form that can be stored and shown.
        inside = path.relative_to(source.root).as_posix() if source.paths is None else path.name
        file = RecordedFile(path, printable(inside), progress, columns=source.columns or "", point=source.point)
        files.append((_kind_of(file, source.form), file))
    read, unread = set[str](), dict[str, str]()  # results by their stems
    for kind, file in sorted(files, key=lambda one: one[0] not in forms):
        several = file_kinds()[kind].several if kind else False
        several |= source.part is not None and kind in forms
        twin, stem = _twin(known.get(kind, []), kind, file.name, several), _stem(file.name)
        is_copy = any(file.name in (other.name + ".gz", other.name + ".zst") for other in known.get(kind, []))
        other_result = "" if kind in forms or stem in read else unread.get(stem, "")
        if kind in forms:
            unread.update({stem: file.name} if twin else {})
            read.update([] if twin else [stem])
        if kind and not other_result and (not twin or (kind in forms and not is_copy)):
            known.setdefault(kind, []).append(file)
            continue
        size, why = file.path.stat().st_size, f"{kind} (not used: {twin} is read)" if twin else "unknown"
        if kind and other_result:
            why = f"{kind} (not used: it belongs to {other_result}, which is not read)"
        others.append(SourceFile(file.name, why, size, file.sha256() if size <= MAX_UNKNOWN_HASHED_BYTES else ""))
    given = source.given()
    if source.columns and not any(form.fields and form.name in known for form in request_formats()):
        if source.alone or not any(form.name in known for form in request_formats()):
            problem = f"no file has columns of --columns {source.columns[:80]}"
            raise RecordingError(source.root, "", problem, columns_there(source, others))
        unused = "option (not used: no file here has such columns)"
        given = tuple(replace(one, kind=unused) if one.name == "--columns" else one for one in given)
    return known, (*others, *given)


def columns_there(source: Source, others: Iterable[SourceFile]) -> str:
    """The columns of the first file that is an unknown table, and what to do about them."""
    for file in others:
        path = source.root / file.name
        if path.is_file() and (names := list(first_record(RecordedFile(path, file.name).head(HEAD_BYTES)))):
            return f"{file.name} has columns {listed(names)}: {HOW_TO_SAY}"
    return f"a table of your own, as CSV, JSON or Parquet, is read with {EXAMPLE}"


def how_to_go_on(source: Source, others: Iterable[SourceFile]) -> str:
    """What to do about a source with nothing that is known in it."""
    files = list(others)
    for file in [file for file in files if file.bytes] or files:
        path = source.root / file.name
        if path.is_file() and (remedy := _wrapped(RecordedFile(path, file.name))):
            return f"{printable(file.name)} {remedy}"
    more = f"; {in_labs(', '.join(labs_formats()))}" if labs_formats() else ""
    return f"{columns_there(source, files)}; formats that are known: server logs, {', '.join(input_formats())}{more}"


# How files begin whose content nobody can read here, and what to do with them.
_UNPACK = "unpack it; gzip and Zstandard files are read as they are"
_WRAPPED = {
    b"PK\x03\x04": f"is a zip archive: {_UNPACK}",
    b"\xfd7zXZ\x00": f"is packed with xz: {_UNPACK}",
    b"BZh": f"is packed with bzip2: {_UNPACK}",
    b"\xff\xfe": "is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: save it as UTF-8",
}


def _wrapped(file: RecordedFile) -> str:
    """Why nothing can be seen of the content of a file; empty where it can."""
    with file.path.open("rb") as stream:
        begin = stream.read(8)
    head = file.head(HEAD_BYTES)
    if begin and not head:
        return "cannot be unpacked: copy it again"
    if not begin:
        return "is empty: copy it again"
    return next((words for magic, words in _WRAPPED.items() if begin.startswith(magic)), "")


def oldest_first(parts: Sequence[RecordedFile]) -> list[RecordedFile]:
    """The parts of a rotated log (``vllm.log.2``, ``vllm.log.1``, ``vllm.log``) in the order of time."""
    return sorted(parts, key=lambda part: _rotation(part.name)[1], reverse=True)


def _rotation(name: str) -> tuple[str, int]:
    match = _ROTATED.fullmatch(name)
    return (name, 0) if match is None else (match[1], int(match[2] or 0))


def stage_of(name: str) -> int:
    """The load stage whose report this file is (``stage_3_lifecycle_metrics.json`` -> 3)."""
    match = file_kinds()[STAGE].is_called(name)
    if match is None:
        raise RecordingError(name, "", "not a stage report", "name it stage_<N>_lifecycle_metrics.json")
    return int(match.group(1))


def _kind_of(file: RecordedFile, form: str) -> str:
    """The kind of a file by name, as ``form`` says or by content; ``""`` if it is unknown."""
    named = next((kind for kind in file_kinds().values() if kind.is_called(file.name)), None)
    if named is not None and named.recognises is None:
        return named.name
    head = file.head(HEAD_BYTES)
    if file.columns and may_have(head, given := given_columns(file.columns)):
        sample = first_record(head)
        return next((form.name for form in request_formats() if form.tells and form.tells(sample, given)), TABLE)
    by_content = (kind.name for kind in file_kinds().values() if kind.recognises and kind.recognises(head))
    return form or next(by_content, named.name if named else "")


def _kind_at(path: Path, name: str, columns: str) -> str:
    return _kind_of(RecordedFile(path, printable(name), columns=columns), "")


def _expanded(named: Iterable[str | Path]) -> Iterable[Path]:
    """Each path, and the paths that a pattern stands for; a pattern that matches nothing stays, to be complained of."""
    for name in named:
        if not str(name):
            raise RecordingError("''", "", "an empty path", "give the directory of one experiment, or its files")
        if "://" in str(name) and not os.path.lexists(name):
            raise RecordingError(printable(str(name)), "", "an address", "download it, then `blis-replay ingest FILE`")
        # Path.glob knows no patterns that begin at the root.
        found = [] if os.path.lexists(name) else sorted(glob.glob(str(name), recursive=True))  # noqa: PTH207
        yield from map(Path, found or [str(name)])


def _experiments_in(root: Path, columns: str) -> list[Path]:
    """The directory itself; or those of its subdirectories that are recordings of their own, if it is not one itself.

    Read as one recording, several experiments would be mixed: same request, other server.
    """
    if not root.is_dir() or _configured(root):
        return [root]
    parts = _recordings_in(root, columns)
    return [folder for part in parts for folder in _experiments_in(part, columns)] if len(parts) > 1 else [root]


def _left_out(root: Path, experiments: Sequence[Path], columns: str) -> Iterator[str]:
    """What else in this directory somebody recorded or set up: folders of no experiment, and files beside them."""
    for path in sorted(root.iterdir()):
        if path.is_file():
            if path.suffix in (".yaml", ".yml") or _kind_at(path, path.name, columns):
                yield printable(path.name)
        elif path not in experiments and (below := [one for one in experiments if path in one.parents]):
            yield from (f"{printable(path.name)}/{name}" for name in _left_out(path, below, columns))
        elif path not in experiments and any(_kind_at(p, p.name, columns) for p in _walk(path)):
            yield printable(path.name)


def _recordings_in(root: Path, columns: str) -> list[Path]:
    """The subdirectories that are recordings: configured ones, and those with a load generator's result each.

    None if the root has a result itself; a table beside several recordings does not count.  Raises
    :class:`RecordingError` where files of a server could belong to any of several results.
    """
    of_kind: dict[str, list[tuple[str, str]]] = {}
    for path in _walk(root):
        inside = path.relative_to(root)
        folder = "" if _recording_folder(path.parent) == root else inside.parts[0]
        kind = _kind_at(path, inside.relative_to(folder).as_posix(), columns)
        of_kind.setdefault(kind, []).append((folder, inside.as_posix()))
    of_kind.pop("", None)
    folders = {kind: {folder for folder, _name in found} for kind, found in of_kind.items()}
    results = {form.name: folders.pop(form.name) for form in request_formats() if form.name in folders}
    configured = {folder.name for folder in root.iterdir() if folder.is_dir() and _configured(folder)}
    # A trace of arrivals can be what was sent, and a plain table anything of the run.
    measured = {form.name for form in request_formats() if form.latencies and form.name != TABLE}
    sure = configured.union(*(found for name, found in results.items() if name in measured))
    parts = sure.union(*(found for found in results.values() if len(found - {""}) > 1)) - {""}
    with_server = parts & set().union(*folders.values())
    several = len(configured) > 1 or any(len(found - {""}) > 1 for found in results.values())
    in_root = any("" in found for found in results.values())
    if not several or "" in sure or (in_root and len(sure | with_server) < 2):
        return []
    beside = [name for kind in folders for folder, name in of_kind[kind] if folder not in parts]
    if beside and not with_server:
        each_of, others = listed(sorted(parts)), listed(sorted(beside))
        problem = f"a load generator's result in each of {each_of}, and {others} beside them"
        each = f"ingest each folder by itself: blis-replay ingest {printable(str(root))}/*"
        raise RecordingError(root, "", problem, f"give --by client if these are clients of one server, or {each}")
    return [root / folder for folder in sorted(parts)]


def _configured(folder: Path) -> bool:
    return any(folder.glob("exp-config.y*ml*"))


def _recording_folder(folder: Path) -> Path:
    return folder.parent if folder.name in ("results", "reports") else folder


def _twin(others: list[RecordedFile], kind: str, name: str, several: bool) -> str:
    """The file among ``others`` that keeps this one from being read."""
    for other in others:
        same_stage = kind == STAGE and stage_of(other.name) == stage_of(name)
        another_log = kind == SERVER_LOG and _rotation(other.name)[0] != _rotation(name)[0]
        if not several or same_stage or another_log or name in (other.name + ".gz", other.name + ".zst"):
            return other.name
    return ""


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[0]


def _walk(directory: Path) -> list[Path]:
    if not directory.is_dir():
        mend = "give the directory of one experiment, or its files"
        what = "neither a directory nor a file" if os.path.lexists(directory) else "no such directory or file"
        raise RecordingError(directory, "", what, mend)
    paths: list[Path] = []
    for folder, folders, names in os.walk(directory):
        folders.sort()
        paths += [path for path in (Path(folder) / name for name in names) if path.is_file()]
        if len(paths) > MAX_FILES:
            raise RecordingError(directory, "", f"more than {MAX_FILES} files", "give the directory of one experiment")
    # What lies in results/ is what the load generator wrote, so it comes before the top folder;
    # what lies deeper is of a part of the run.
    names_of = {path: path.relative_to(directory).as_posix() for path in paths}
    return sorted(paths, key=lambda path: ("/" not in names_of[path], names_of[path].count("/"), names_of[path]))
