"""Which files of an experiment directory are which, by name and place."""

from __future__ import annotations

import os
import re
from pathlib import Path

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.printable import printable
from blis_replay.ingest.readers.files import Progress, RecordedFile
from blis_replay.ingest.recording import SourceFile

MAX_FILES = 10_000
MAX_UNKNOWN_HASHED_BYTES = 1 << 30

# Kind of file -> pattern of its path inside the recording.  A load generator may put a
# prefix of the user's before the names of its reports, and any file may be gzip'ed.
_RESULTS = r"(?:(?:results|reports)/)?"
_KINDS: dict[str, str] = {
    "experiment configuration": r"exp-config\.ya?ml",
    "load profile": r"profile\.ya?ml",
    "inference-perf configuration": r"(?:(?:results|reports)/)(?:\S*?[-_.])?config\.ya?ml|config\.ya?ml",
    "inference-perf summary": _RESULTS + r"(?:\S*?[-_.])?summary_lifecycle_metrics\.json",
    "inference-perf stage": _RESULTS + r"(?:\S*?[-_.])?stage_(\d{1,6})_lifecycle_metrics\.json",
    "inference-perf requests": _RESULTS + r"(?:\S*?[-_.])?per_request_lifecycle_metrics\.json",
    "TraceV2 header": r"trace\.ya?ml",
    "TraceV2 requests": r"trace\.csv",
    "OTLP traces": r"traces(?:-[\w.:+-]+)?\.(?:json|pb)(?:\.zst)?",
    "server log": r"vllm\.log",
}
_PATTERNS = {kind: re.compile(rf"(?:{pattern})(?:\.gz)?", re.ASCII) for kind, pattern in _KINDS.items()}
# There can be several of these; of every other kind one is read.
_MANY = ("inference-perf stage", "OTLP traces")


def find(directory: Path, progress: Progress | None) -> tuple[dict[str, list[RecordedFile]], tuple[SourceFile, ...]]:
    """The known files of a directory by kind, in the order of their names, and the others.

    Others have kind ``unknown``, or ``duplicate of NAME`` where a file stands beside its
    gzip'ed twin.  Raises :class:`RecordingError` if there is no such directory.
    """
    known: dict[str, list[RecordedFile]] = {}
    others: list[SourceFile] = []
    for path in _walk(directory):
        # A name that is no text, or that a terminal would obey, is kept in a form that can be stored and shown.
        name = printable(path.relative_to(directory).as_posix())
        file = RecordedFile(path, name, progress)
        kind = kind_of(name)
        twin = _twin(known.get(kind, []), kind, name)
        if kind and not twin:
            known.setdefault(kind, []).append(file)
        else:
            others.append(_unread(file, f"{kind} (not used: {twin} is read)" if twin else "unknown"))
    return known, tuple(others)


def kind_of(name: str) -> str:
    """The kind of a file by its path inside the recording, ``""`` if it is none of ours."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(name)), "")


def stage_of(name: str) -> int:
    """The load stage whose report this file is (``stage_3_lifecycle_metrics.json`` -> 3)."""
    match = _PATTERNS["inference-perf stage"].fullmatch(name)
    if match is None:
        raise RecordingError(name, "", "not a stage report", "name it stage_<N>_lifecycle_metrics.json")
    return int(match.group(1))


def _twin(found: list[RecordedFile], kind: str, name: str) -> str:
    """The file already found that stands in the way of this one."""
    for other in found:
        same_stage = kind == "inference-perf stage" and stage_of(other.name) == stage_of(name)
        if kind not in _MANY or same_stage or other.name + ".gz" == name:
            return other.name
    return ""


def _walk(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise RecordingError(directory, "", "no such directory", "give the directory of one experiment")
    paths: list[Path] = []
    for folder, folders, names in os.walk(directory):
        folders.sort()
        paths += [path for path in (Path(folder) / name for name in names) if path.is_file()]
        if len(paths) > MAX_FILES:
            raise RecordingError(directory, "", f"more than {MAX_FILES} files", "give the directory of one experiment")
    # What lies in results/ is what the load generator wrote, so it comes before the top folder.
    names_of = {path: path.relative_to(directory).as_posix() for path in paths}
    return sorted(paths, key=lambda path: ("/" not in names_of[path], names_of[path]))


def _unread(file: RecordedFile, kind: str) -> SourceFile:
    size = file.path.stat().st_size
    hashed = file.sha256() if size <= MAX_UNKNOWN_HASHED_BYTES else ""
    return SourceFile(name=file.name, kind=kind, bytes=size, sha256=hashed)
