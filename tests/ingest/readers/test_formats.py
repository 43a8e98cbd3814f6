"""The table of file kinds: its order, and formats that another distribution plugs in."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from blis_replay.ingest.readers import formats
from blis_replay.ingest.readers.discovery import find, only_source
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.requests import READ_SCHEMA, RequestsRead
from blis_replay.ingest.rows import no_rows


def _read(_file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    return RequestsRead(no_rows(READ_SCHEMA), "client", "relative")


GATEWAY = RequestFormat("gateway", lambda head: head.startswith(b"gateway"), read=_read)


def test_a_format_of_an_add_on_is_known_before_tables_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("format.gateway", f"{__name__}:GATEWAY", "blis_replay.addons")
    caches = (formats._plugged_in, formats.request_formats, formats.file_kinds, formats.input_formats)
    monkeypatch.setattr(formats, "addons", lambda socket: {"gateway": point} if socket == "format" else {})
    for cached in caches:
        cached.cache_clear()
    try:
        names = [form.name for form in formats.request_formats()]
        assert names.index("parquet") < names.index("gateway") < names.index("table")
        assert "gateway" in formats.input_formats()
        assert formats.labs_formats() == formats.LABS_FORMATS
        (tmp_path / "log.txt").write_text("gateway,1,2\n")
        known, _others = find(only_source(tmp_path), None)
        assert list(known) == ["gateway"]
    finally:
        for cached in caches:
            cached.cache_clear()


def test_a_file_is_of_the_kind_that_its_usual_name_says() -> None:
    called = {
        "exp-config.yaml": "experiment configuration",
        "results/mine-summary_lifecycle_metrics.json.gz": "inference-perf summary",
        "stage_3_lifecycle_metrics.json": "inference-perf stage",
        "traces-1.jsonl": "otlp",
        "vllm.log.2": "server log",
        "notes.txt": None,
    }
    for path, kind in called.items():
        assert next((k.name for k in formats.file_kinds().values() if k.is_called(path)), None) == kind
