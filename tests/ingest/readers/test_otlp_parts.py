"""Traces read into a database by small batches are the traces read in memory, to the row and to the rejected record."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_otlp_journeys import EPOCH_NS, api_span, event, step_span, whole

from blis_replay.ingest import rows as ingest_rows
from blis_replay.ingest import scratch as ingest_scratch
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp import traces as otlp_traces
from blis_replay.ingest.readers.otlp.journeys import on_zero
from blis_replay.ingest.readers.otlp.traces import TracesRead, read_traces
from blis_replay.ingest.scratch import Scratch
from blis_replay_labs.planted.writers_otlp import attributes

pytestmark = pytest.mark.slow

Span = tuple[str, dict[str, Any]]


def snapshot_span(step_id: int, *requests: int, computed: int = 0) -> Span:
    events = []
    for request in requests:
        values = {
            "step.id": step_id,
            "request.id": f"cmpl-load-{request}-0-0000000{request}",
            "request.phase": "DECODE",
        }
        values |= {"request.num_prompt_tokens": 100, "request.effective_prompt_len": 36}
        values |= {"request.num_computed_tokens": computed}
        stamp = str(EPOCH_NS + step_id * 10**6)
        events.append({"name": "step.REQUEST_SNAPSHOT", "timeUnixNano": stamp, "attributes": attributes(values)})
    name = f"scheduler_steps_{step_id}"
    return "vllm.scheduler.step", {"spanId": f"{step_id + 2**61:016x}", "name": name, "events": events}


def spans(seed: int) -> list[Span]:
    """Twenty journeys in any order, some spans twice and some again with other values, steps and snapshots alike."""
    draw = random.Random(seed)  # noqa: S311 (no secret)
    found = [span for number in range(1, 21) for span in whole(number, 7 * (number % 9))]
    found += [step_span(number, (number, number), (number + 100, number + 100)) for number in range(1, 16)]
    found += [snapshot_span(number, number, number + 1) for number in range(1, 16)]
    found += draw.sample(found, 15)
    found += [api_span(number, event("api.DEPARTED", 99)) for number in (3, 17)]
    found += [step_span(5, (5, 6.5)), snapshot_span(7, 7, computed=3)]
    draw.shuffle(found)
    return found


def written(folder: Path, found: list[Span]) -> list[Path]:
    """Two files, as a collector rotates them."""
    paths = [folder / "traces-1.json", folder / "traces-2.json"]
    for path, part in zip(paths, (found[: len(found) // 3], found[len(found) // 3 :]), strict=True):
        documents = [
            {"resourceSpans": [{"scopeSpans": [{"scope": {"name": name}, "spans": [span]}]}]} for name, span in part
        ]
        path.write_text("\n".join(json.dumps(document) for document in documents))
    return paths


def read(paths: list[Path], scratch: Scratch) -> tuple[TracesRead, list[tuple[int, int, list[tuple[str, str]]]]]:
    files = [RecordedFile(path, path.name) for path in paths]
    found = read_traces(files, scratch)
    return found, [(file.tally.records, file.tally.rejected_count, file.tally.rejected) for file in files]


@pytest.mark.heavy
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6), batch_rows=st.integers(1, 25), batch_spans=st.integers(1, 60), restarted=st.booleans()
)
def test_small_batches_in_a_database_are_the_same_traces(
    tmp_path_factory: pytest.TempPathFactory, seed: int, batch_rows: int, batch_spans: int, restarted: bool
) -> None:
    """Whatever the sizes of batches, and wherever rows are, the traces are those of one batch that stays in memory.

    Of the twenty journeys 8 start at 0, 7 or 14 ms and are over after 72 ms; a restart after 75 ms leaves the other 12.
    Of the API spans of two of these there are two with other values; without a restart 15 spans are there twice too.
    """
    paths = written(tmp_path_factory.mktemp("traces"), spans(seed) + [step_span(700, (200, 75))] * restarted)
    expected, tallies = read(paths, Scratch())
    assert expected.journeys is not None
    lifecycles, events = on_zero(expected.journeys, 0, Scratch())
    assert lifecycles.height == (12 if restarted else 20)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(otlp_traces.BatchRows, "full", property(lambda rows: len(rows.spans) >= batch_spans))
        patched.setattr(ingest_scratch, "MEMORY_BYTES", 0)
        patched.setattr(ingest_rows, "BATCH_ROWS", batch_rows)
        patched.setattr(otlp_journeys, "_WIDE_ROWS", batch_rows)
        patched.setattr(otlp_journeys, "_SORTED_ROWS", batch_rows)
        scratch = Scratch()
        found, found_tallies = read(paths, scratch)
        assert found.journeys is not None
        found_lifecycles, found_events = on_zero(found.journeys, 0, scratch)
        in_database = (found.steps, found.journeys.events, found.journeys.lifecycles, found_events)
        assert all(rows.held is None for rows in in_database)
        assert found_tallies == tallies
        assert sum(count for _records, count, _rejected in tallies) >= (2 if restarted else 17)
        for one, other in (
            (found.steps, expected.steps),
            (found.snapshots, expected.snapshots),
            (found_lifecycles, lifecycles),
            (found_events, events),
        ):
            assert one.frame().equals(other.frame())
    assert found.requests is not None and expected.requests is not None
    assert found.requests.frame.equals(expected.requests.frame)
    same = {"snapshots": None, "steps": None, "journeys": None, "requests": None}
    assert replace(found, **same) == replace(expected, **same)
