"""What a recording is called, and what tells its requests from those of another, whatever its directory is called."""

from __future__ import annotations

import hashlib
import re

import numpy as np

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
    return f"{short}{hf}-{workload}"


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
