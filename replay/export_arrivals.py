"""What formats that carry arrivals, lengths and prefixes only have in common."""

from __future__ import annotations

from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import Recording


def lost_of_arrivals(recording: Recording, trace: RequestTrace) -> list[str]:
    """What such a format loses of a recording beside whole columns, in words."""
    unknown = recording.requests["prompt_tokens"].null_count()
    said = {
        f"that prompt_tokens of {unknown} requests are not known (estimated)": unknown > 0,
        "prefix-cache hits, which are known as numbers only": bool((trace.prefill_tokens < trace.prompt_tokens).any()),
    }
    return [words for words, true in said.items() if true]
