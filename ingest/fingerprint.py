"""What tells the requests of one recording from those of another, whatever its directory is called."""

from __future__ import annotations

import hashlib

import numpy as np

from blis_replay.ingest.recording import Recording

_COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us")
_NOT_KNOWN = -1


def requests_hash(recording: Recording) -> str:
    """SHA-256 over arrival, lengths, TTFT and E2E of every request, in send order; empty without requests.

    A copy of a recording has the hash of the original, under any name and with any engine arguments.
    """
    if recording.requests.height == 0:
        return ""
    digest = hashlib.sha256()
    for name in _COLUMNS:
        values = recording.requests[name].fill_null(_NOT_KNOWN).to_numpy().astype("<i8")
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
