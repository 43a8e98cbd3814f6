"""What a recording is called, and what tells its requests from those of another, whatever its directory is called."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.recording import Recording

_SLUG = re.compile(r"\d{8}-\d{6}-(?P<model>.+)-tp\d+-.+")
# A bare number there counts runs and names no workload.
_WORKLOAD = re.compile(r".*-tp\d+-(?P<workload>(?!\d+$).+)")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)


def alias_of(slug: str, model: str | None, workload: str) -> str:
    """The short name of an experiment: model size or family, ``-hf`` where the slug says so, workload.

    Size and family come from the configured ``model``; a folder's name can be wrong about them.
    Without a model the workload has to do.  Files are called like it, so it has no path separators.
    """
    workload = re.sub(r"[/\\]+", "-", workload)
    if model is None:
        return workload
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    size = _SIZE.search(name.replace("-", " "))
    if "mixtral" in name:
        short = "mixtral"
    else:
        short = size[0].strip() if size else re.sub(r"[^a-z0-9.]+", "-", name).strip("-") or "model"
    match = _SLUG.fullmatch(slug)
    hf = "-hf" if match and match["model"].endswith("-hf") else ""
    named = f"{short}{hf}"
    return workload if f"{workload}-".startswith(f"{named}-") else f"{named}-{workload}"


def workload_of(directory_name: str, app: str | None) -> str:
    """The workload: what follows the last ``-tp<N>-`` of the directory's name, else ``app``, else that name."""
    match = _WORKLOAD.fullmatch(directory_name)
    return match["workload"] if match else app or directory_name


_HASHED = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us")
_NOT_KNOWN = -1


def requests_hash(recording: Recording) -> str:
    """SHA-256 over arrival, lengths, TTFT and E2E of every request, in send order; empty without requests.

    A copy of a recording has the hash of the original, under any name and with any engine arguments.
    """
    if recording.requests.height == 0:
        return ""
    digest = hashlib.sha256()
    for name in _HASHED:
        values = recording.requests[name].fill_null(_NOT_KNOWN).to_numpy().astype("<i8")
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


# Keys in a sketch, the smallest of a recording: a slice of 100 of 16,800 requests has one in 19 of 20 cases.
SKETCH_KEYS = 512
_TENTH_OF_MS_US, _MS_US = 100, 1_000  # what other files of the same run round latencies to
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)

Keys = NDArray[np.uint32]


def request_keys(recording: Recording) -> Keys:
    """Sorted uint32 of the requests with latencies: a hash of each, and of each with the one sent after it.

    A single request is hashed by its prompt tokens, and TTFT and E2E in tenths of ms.  A pair is hashed by its four
    latencies in whole ms, which survive coarser rounding and other prompt token counts.  Two runs of one load share
    hardly any key; a part of a recording shares all of its own.
    """
    rows = recording.requests.frame(["prompt_tokens", "ttft_us", "e2e_us"]).drop_nulls(["ttft_us", "e2e_us"])
    latencies = [rows[name].to_numpy() for name in ("ttft_us", "e2e_us")]
    prompts = rows["prompt_tokens"].fill_null(_NOT_KNOWN).to_numpy()
    whole = [np.rint(us / _MS_US) for us in latencies]
    alone = _hashed([prompts, *(np.rint(us / _TENTH_OF_MS_US) for us in latencies)])
    in_pairs = _hashed([*(ms[:-1] for ms in whole), *(ms[1:] for ms in whole)])
    return np.unique(np.concatenate([alone, in_pairs]))


def _hashed(columns: Sequence[NDArray[np.generic]]) -> Keys:
    """uint32[rows]: a hash of whole numbers, int64[rows] each."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column, odd in zip(columns, _ODD[: len(columns)], strict=True):
        mixed = (mixed ^ column.astype(np.int64).view(np.uint64)) * odd
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(16)).astype(np.uint32)


_MOST_SHIFTED = 50  # requests that may be missing at the beginning of a copy


def shared_requests(one: Recording, other: Recording) -> float:
    """The largest share of the requests of ``other`` that have the latencies of those of ``one``, in the same order.

    To 0.1 ms, or to what either side rounds to, 10 ms at most.  Requests at the beginning or the end may be missing.
    """
    sides, units = [], [_TENTH_OF_MS_US]
    for recording in (one, other):
        rows = recording.requests.frame(["ttft_us", "e2e_us"]).drop_nulls("e2e_us")
        sides.append(rows.fill_null(0).to_numpy().astype(np.int64))
        units.append(int(np.gcd.reduce(sides[-1], axis=None)) if rows.height else 0)
    known, found = sides
    most, near_us = 0, min(max(units), 10 * _MS_US)
    for shift in {*range(-_MOST_SHIFTED, _MOST_SHIFTED + 1), len(known) - len(found)}:
        of_one, of_other = known[max(shift, 0) :], found[max(-shift, 0) :]
        both = min(len(of_one), len(of_other))
        alike = np.abs(of_one[:both] - of_other[:both]) <= near_us
        most = max(most, int(alike.all(axis=1).sum()))
    return most / max(len(found), 1)


def sketch_of(recording: Recording) -> str | None:
    """The smallest keys of its requests, as text; None without latencies."""
    keys = request_keys(recording)[:SKETCH_KEYS]
    return base64.b64encode(keys.astype("<u4").tobytes()).decode("ascii") if len(keys) else None


def shared_with(sketch: str, keys: Keys) -> float:
    """The share of these keys that a sketch contains, 0 to 1; 0 for an invalid sketch."""
    try:
        known = np.frombuffer(base64.b64decode(sketch, validate=True), "<u4")
    except (binascii.Error, ValueError):
        return 0.0
    # Of a longer recording the sketch has only the smallest keys, so only those can be looked for.
    among = keys if len(known) < SKETCH_KEYS else keys[keys <= known.max()]
    return float(np.isin(among, known).mean()) if len(among) else 0.0
