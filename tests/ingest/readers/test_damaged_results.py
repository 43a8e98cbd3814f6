"""Results of load generators with something wrong in them: every request is read or rejected, and nothing breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import damaged, mutated
from test_reader_aiperf import SUMMARY, metric, with_metrics
from test_reader_guidellm import WHOLE
from test_reader_inference_perf_requests import record
from test_reader_vllm_bench import result

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.clients import aiperf, guidellm, inference_perf, vllm_bench
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead


def in_lists(document: Any) -> int:
    """Records in the lists of GuideLLM."""
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    requests = [b.get("requests") for b in benchmarks if isinstance(b, dict)] if isinstance(benchmarks, list) else []
    named = [r.get(name) for r in requests if isinstance(r, dict) for name in ("successful", "errored", "incomplete")]
    return sum(len(records) for records in named if isinstance(records, list))


def longest_column(document: Any) -> int:
    """Requests of the longest column of vllm bench."""
    columns = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
    return max((len(document[name]) for name in columns if isinstance(document.get(name), list)), default=0)


def objects(document: list[Any]) -> int:
    """Records of inference-perf; what lies between them is text that belongs to none."""
    return sum(isinstance(one, dict | list) for one in document)


@dataclass(frozen=True)
class Form:
    """A format: a sound file, how many requests another one has, and the places of those that are rejected."""

    read: Callable[[RecordedFile, Path], RequestsRead]
    sound: Any
    written: Callable[[Any], int]
    place: str


FORMS = {
    "aiperf": Form(aiperf.read_requests, with_metrics(usage_completion_tokens=metric(3)), lambda _document: 1, "line "),
    "aiperf-summary": Form(aiperf.read_summary, SUMMARY, lambda _document: 0, "line "),
    "guidellm": Form(guidellm.read_requests, WHOLE, in_lists, "benchmarks["),
    "inference-perf": Form(inference_perf.read_requests, [record(0), record(1)], objects, "record "),
    "vllm-bench": Form(vllm_bench.read_requests, result(3), longest_column, "request "),
}


def read(folder: Path, form: Form, content: bytes) -> tuple[RequestsRead, RecordedFile] | None:
    """What is read; None where the file is refused in one line."""
    file = recorded_file(folder, content)
    try:
        found = form.read(file, folder / "stamps")
    except RecordingError as error:
        assert "\n" not in str(error)
        return None
    assert found.events is None or len(found.events.counts) == found.rows.height
    return found, file


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_request_of_a_mutated_file_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    document = data.draw(mutated(form.sound))
    if (answer := read(tmp_path_factory.mktemp("m"), form, json.dumps(document).encode())) is None:
        return
    found, file = answer
    broken_off = any("no valid JSON" in reason for _place, reason in file.tally.rejected)
    rejected = sum(place.startswith(form.place) for place, _reason in file.tally.rejected)
    assert broken_off or found.rows.height + rejected == form.written(document)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_break_a_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    content = data.draw(damaged(form.sound))
    if answer := read(tmp_path_factory.mktemp("d"), form, content):
        found, file = answer
        assert found.rows.height <= form.written(form.sound)
        if name == "aiperf":
            lines = sum(bool(line.strip()) for line in content.split(b"\n"))
            assert file.tally.records + file.tally.rejected_count == lines
