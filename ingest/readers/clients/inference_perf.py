"""inference-perf's per-request records: ``per_request_lifecycle_metrics.json``, one array of any size.

Three generations: up to 0.4 (``info.output_token_times``: one stamp a stream event, of
which there can be two a token), 0.5 (``info.response_info``), from 0.6
(``info.response_metrics``).  The later ones also have ``chunk_times``, the plain arrival
times, and the server's usage.  Stamps are kept as recorded.  Of prompts hashes are kept, of
responses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.ingest.readers.clients.inference_perf_records import (
    MAX_RECORD_BYTES,
    NO_NUMBERS,
    NUMBERS,
    Part,
    decoded_parts,
)
from blis_replay.ingest.readers.clients.prompt_texts import PromptTexts, raw_prompts
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import json_objects
from blis_replay.ingest.readers.requests import READ_SCHEMA, RawEvents, RequestsRead
from blis_replay.ingest.rows import rows_of


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a per-request report."""
    return head.lstrip()[:1] == b"[" and b'"start_time"' in head and b'"end_time"' in head


def read_requests(file: RecordedFile, events_path: Path) -> RequestsRead:
    """The requests in file order; their raw stream stamps go to the flat file ``events_path``.

    Times are on the client's monotonic clock.  Failed requests keep no TTFT; their E2E is the
    time for which the client held on.  Memory is bounded by a batch of requests.  A
    record that cannot be used is rejected and counted by its ordinal.
    """
    hashes_path = events_path.with_suffix(".prompts")
    with events_path.open("wb") as stream, hashes_path.open("wb") as hashes:
        texts = PromptTexts(hashes)
        parts = decoded_parts(file, json_objects(file, MAX_RECORD_BYTES), stream, texts)
        whole = in_file_order(file, parts)
        texts.flush()
    file.tally.records = len(whole.frame)
    events = RawEvents(events_path, whole.offsets, whole.counts) if whole.counts.any() else None
    model = whole.model[1] if whole.model else None
    prompt_tokens = whole.frame["prompt_tokens"].fill_null(0).to_numpy()
    prefix = raw_prompts(texts, hashes_path, whole.prompts, prompt_tokens)
    return RequestsRead(rows_of(whole.frame), "client", "monotonic", model, events, prefix=prefix)


def in_file_order(file: RecordedFile, parts: Iterable[Part]) -> Part:
    """All parts as one; a record that is there before, identical, is rejected."""
    frames, numbers = [pl.DataFrame(schema=READ_SCHEMA)], [NO_NUMBERS]
    model: tuple[int, str] | None = None
    for part in parts:
        frames.append(part.frame)
        numbers.append(np.stack([getattr(part, name) for name in NUMBERS]))
        model = min((named for named in (model, part.model) if named), default=None)
    ordinals, digests, *_ = every = np.concatenate(numbers, axis=1)
    order = np.argsort(ordinals, kind="stable")
    firsts = order[np.sort(np.unique(digests[order], return_index=True)[1])]
    for ordinal in np.setdiff1d(ordinals, ordinals[firsts]).tolist():
        file.tally.reject(f"record {ordinal}", "the same record again, identical")
    return Part(frame=pl.concat(frames)[firsts], model=model, **dict(zip(NUMBERS, every[:, firsts], strict=True)))
