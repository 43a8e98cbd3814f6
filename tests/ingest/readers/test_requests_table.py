"""Any table of requests: columns by name and as the user says, units, forms, what is refused, what is remembered."""

from __future__ import annotations

import json
from datetime import datetime
from heapq import heappushpop
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RawPrompts, RequestsRead
from blis_replay.ingest.readers.tables.columns import date_us, given_columns
from blis_replay.ingest.readers.tables.requests_table import read_requests, recognises
from blis_replay.ingest.recording import ARRIVALS, REBUILT, RECORDED
from blis_replay.ingest.store.file import open_store
from blis_replay.ingest.store.recordings import read_stored

# Two requests in the wrong order: sent at 0.5 and 0.1 s, TTFT 50 and 40 ms, E2E 150 and 160 ms.
TABLE = "id,arrival_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms\na,0.5,100,10,50,150\nb,0.1,120,12,40,160\n"


def read(folder: Path, content: object, said: str = "") -> tuple[RequestsRead, RecordedFile]:
    """A table from text, bytes or JSON lines."""
    path = folder / "table"
    if isinstance(content, list):
        content = "\n".join(map(json.dumps, content))
    path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    file = RecordedFile(path, path.name, columns=said)
    return read_requests(file, folder / "stamps"), file


def row(found: RequestsRead, number: int = 0) -> dict[str, Any]:
    return found.frame.row(number, named=True)


def stamps(found: RequestsRead) -> list[int]:
    assert found.events is not None
    return np.fromfile(found.events.path, np.int64).tolist()


def test_names_that_say_their_unit_need_no_mapping(tmp_path: Path) -> None:
    found, file = read(tmp_path, TABLE)
    first = row(found)
    assert (first["sent_us"], first["ttft_us"], first["e2e_us"]) == (500_000, 50_000, 150_000)
    assert (first["prompt_tokens"], first["usage_output_tokens"], first["status"]) == (100, 10, "ok")
    assert (first["request_id"], found.clock_kind, found.remarks) == ("a", "relative", ())
    assert (file.tally.records, file.tally.rejected_count) == (2, 0)
    assert found.version == (
        "table (arrival=arrival_s:s,ttft=ttft_ms:ms,e2e=e2e_ms:ms,prompt_tokens=prompt_tokens,"
        "output_tokens=output_tokens,request_id=id)"
    )


@pytest.mark.parametrize(
    ("name", "value", "ttft_us"),
    [
        *(("ttft_ms", 50, 50_000), ("TTFT (s)", 0.05, 50_000), ("timeToFirstTokenMs", "50.5", 50_500)),
        *(("time_to_first_token_ns", 50_000_000, 50_000), ("first_token_latency_microseconds", 50, 50)),
    ],
)
def test_units_are_in_the_name_however_it_is_written(tmp_path: Path, name: str, value: object, ttft_us: int) -> None:
    found, _file = read(tmp_path, [{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 2, name: value}])
    assert row(found)["ttft_us"] == ttft_us


def test_the_user_says_what_columns_are_and_the_rest_is_read_by_name(tmp_path: Path) -> None:
    table = "sent;in;output_tokens;first;note\n2026-01-01T00:00:00.5Z;7;3;0.25;x\n"
    found, _file = read(tmp_path, table, "arrival=sent:iso, prompt_tokens=in, ttft=first:s")
    assert row(found)["sent_us"] == date_us(datetime(2026, 1, 1)) + 500_000  # type: ignore[operator]
    assert (row(found)["prompt_tokens"], row(found)["usage_output_tokens"], row(found)["ttft_us"]) == (7, 3, 250_000)
    assert found.clock_kind == "epoch"
    assert found.remarks == (
        "columns of table that were not read: note",
        "e2e of the requests: no column of table has them",
    )


def test_stamps_give_latencies_and_names_lead_into_nested_json(tmp_path: Path) -> None:
    """Sent at 10.0, scheduled at 10.5, first token at 11, end at 13 s."""
    record = {"t": {"sent": 10.0, "sched": 10.5, "first": 11, "end": 13}, "usage": {"in": 5, "out": 9}}
    said = "arrival=t.sent:s,scheduled=t.sched:s,first_token=t.first:s,end=t.end:s,prompt_tokens=usage.in"
    found, _file = read(tmp_path, [record], said + ",output_tokens=usage.out")
    first = row(found)
    assert (first["queue_us"], first["ttft_us"], first["e2e_us"]) == (500_000, 1_000_000, 3_000_000)
    assert (first["prompt_tokens"], first["usage_output_tokens"]) == (5, 9)


def test_nanoseconds_of_the_epoch_keep_their_digits(tmp_path: Path) -> None:
    """A float of 1.7e18 is 256 ns coarse; the integer is not made one."""
    found, _file = read(tmp_path, [{"arrival_ns": 1_760_000_000_123_456_789, "prompt_tokens": 1, "osl": 1}])
    assert row(found)["sent_us"] == 1_760_000_000_123_457


@pytest.mark.parametrize("times", [[1.25, 1.5, 2.0], "[1.25, 1.5, 2.0]", "1.25;1.5;2.0"])
def test_token_times_are_stamps_of_the_arrivals_clock(tmp_path: Path, times: object) -> None:
    record = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3, "token_times_s": times}
    found, _file = read(tmp_path, [record])
    assert stamps(found) == [1_250_000, 1_500_000, 2_000_000]
    assert (row(found)["ttft_us"], row(found)["e2e_us"]) == (250_000, 1_000_000)


def test_gaps_between_tokens_follow_the_first(tmp_path: Path) -> None:
    record = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3, "ttft_s": 0.25, "itls_ms": [250, 500]}
    found, _file = read(tmp_path, [record])
    assert stamps(found) == [1_250_000, 1_500_000, 2_000_000]
    assert row(found)["e2e_us"] == 1_000_000


def test_failures_keep_no_ttft_and_no_length(tmp_path: Path) -> None:
    base = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3, "ttft_ms": 4, "e2e_ms": 9}
    said = ["Success", 200, True, "failed", 503, "Timed out", "cancelled", None]
    found, _file = read(tmp_path, [{**base, "status": status} for status in said])
    assert found.frame["status"].to_list() == ["ok", "ok", "ok", "error", "error", "timeout", "aborted", "ok"]
    assert (row(found, 3)["ttft_us"], row(found, 3)["e2e_us"], row(found, 3)["usage_output_tokens"]) == (
        None,
        9_000,
        None,
    )
    raised = ["ClientConnectorError", "asyncio.TimeoutError", "HTTPException", "ReadTimeout"]
    found, _file = read(tmp_path, [{**base, "status": status} for status in raised])
    assert found.frame["status"].to_list() == ["error", "timeout", "error", "timeout"]
    assert found.frame["error"].to_list() == raised
    found, _file = read(tmp_path, [{**base, "error": error} for error in ("", None, "Connection lost", "read timeout")])
    assert found.frame["status"].to_list() == ["ok", "ok", "error", "timeout"]


def test_requests_of_a_prefix_group_share_its_tokens(tmp_path: Path) -> None:
    """The 40 of group a; the third request names no group."""
    rows = [{"prefix": "a", "prefix_tokens": 40}, {"prefix": "a", "prefix_tokens": 50}, {"prefix": ""}]
    base = {"arrival_s": 1, "prompt_tokens": 90, "output_tokens": 3}
    found, _file = read(tmp_path, [{**base, **more} for more in rows])
    assert isinstance(found.prefix, RawPrompts)
    assert (found.prefix.prompt.tolist(), found.prefix.shared_tokens.tolist()) == ([0, 1, -1], [0, 40])


def test_objects_need_not_have_the_same_keys(tmp_path: Path) -> None:
    """The first request failed, so its record has no latency."""
    records = [{"arrival_s": 1, "prompt_tokens": 5, "error": "x"}, {"arrival_s": 2, "prompt_tokens": 5, "ttft_ms": 7}]
    found, _file = read(tmp_path, json.dumps(records))
    assert found.frame["ttft_us"].to_list() == [None, 7_000]
    assert found.frame["status"].to_list() == ["error", "ok"]


def test_a_parquet_table_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "a[b]*.parquet"  # characters of a pattern
    frame = pl.DataFrame({"sent": [datetime(2026, 1, 1), None], "isl": [5, 6], "osl": [2, 3]})
    frame = frame.with_columns(pl.Series("itls_s", [[0.5, 0.5], [0.1]]), pl.Series("ttft_s", [1.0, 1.0]))
    frame.write_parquet(path)
    file = RecordedFile(path, path.name, columns="arrival=sent:iso")
    found = read_requests(file, tmp_path / "stamps")
    assert file.tally.rejected == [("row 2", "no arrival")]
    assert (row(found)["prompt_tokens"], row(found)["e2e_us"]) == (5, 2_000_000)
    (source,) = sources_of([path], slug="p", columns="arrival=sent:iso")
    with read_recording(source) as recording:
        assert recording.requests.height == 1


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("arrival_s", "", "no arrival"),
        ("arrival_s", "soon", "arrival 'soon' is not a number of s"),
        ("arrival_s", "-1", "arrival '-1' is before the clock's zero"),
        ("prompt_tokens", "1.5", "prompt_tokens '1.5' is not a number of tokens"),
        ("prompt_tokens", "a prompt of", "prompt_tokens (a text of 11 characters) is not a number of tokens"),
        ("prompt_tokens", "7" * 24 + "x", "prompt_tokens (a text of 25 characters) is not a number of tokens"),
        ("arrival_s", "2026-01-01 10:00:00", "arrival '2026-01-01 10:00:00' is not a number of s"),
        ("ttft_ms", "-3", "ttft '-3' is not a duration"),
        ("ttft_ms", "1,5", "ttft '1,5' is not a number of ms"),
        ("ttft_ms", "151", "the first token comes 1000 us after the end"),
        ("status", "perhaps", "status 'perhaps' is not one of ok, error, timeout, aborted"),
    ],
)
def test_a_bad_value_costs_its_row_and_is_named(tmp_path: Path, column: str, value: str, reason: str) -> None:
    good = {
        "arrival_s": "1",
        "prompt_tokens": "5",
        "output_tokens": "3",
        "ttft_ms": "50",
        "e2e_ms": "150",
        "status": "",
    }
    found, file = read(tmp_path, [good, {**good, column: value}])
    assert len(found.frame) == 1
    assert file.tally.rejected == [("line 2", reason)]


@pytest.mark.parametrize("nothing", ["", "NaN", "null", None, float("nan")])
def test_nothing_is_written_in_several_ways(tmp_path: Path, nothing: object) -> None:
    content = json.dumps({"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3, "ttft_ms": nothing})
    found, file = read(tmp_path, content.replace("NaN", "null") if isinstance(nothing, float) else content)
    assert (row(found)["ttft_us"], file.tally.rejected_count) == (None, 0)


@pytest.mark.parametrize(
    ("table", "said", "problem"),
    [
        (TABLE, "e2e=e2e_mss:ms", "no column 'e2e_mss', which --columns gives to e2e; did you mean e2e_ms?"),
        ([{"a": 1}], "arrival=b:s", "no column 'b', which --columns gives to arrival; remove it, or use one of a"),
        (TABLE.replace("ttft_ms", "ttft"), "", "column 'ttft' says no unit of time; add --columns ttft=ttft:UNIT"),
        (
            TABLE.replace("arrival_s", "start").replace("ttft_ms", "ttft").replace("e2e_ms", "latency"),
            "",
            "columns 'start', 'ttft', 'latency' say no unit of time; "
            "add --columns arrival=start:UNIT,ttft=ttft:UNIT,e2e=latency:UNIT",
        ),
        (TABLE.replace("arrival_s", "when"), "", "no column is the arrival of a request; its columns are id, when"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(tmp_path: Path, table: object, said: str, problem: str) -> None:
    with pytest.raises(RecordingError) as refused:
        read(tmp_path, table, said)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("tftt=x:ms", "'tftt' is not a field of a request; did you mean ttft?"),
        ("ttft=x", "ttft is a time, and its unit is not said; add one of ns, us, ms, s, e.g. ttft=x:ms"),
        ("ttft=x:ms,ttft=y:ms", "ttft has a column already, x"),
    ],
)
def test_what_is_said_of_columns_must_have_its_form(said: str, problem: str) -> None:
    with pytest.raises(RecordingError) as refused:
        given_columns(said)
    assert problem in str(refused.value)


def test_a_table_is_known_by_the_names_of_its_columns() -> None:
    assert recognises(TABLE.encode())
    assert recognises(b'[{"arrival_us": 5, "input_tokens": 7, "usage": {"x": [1]}, "osl": 2}')
    assert recognises(b"\xef\xbb\xbfarrival_s\tisl\tosl\n1\t2\t3\n")
    assert not recognises(b"arrival_s,prompt_tokens,ttft_ms\n1,2,3\n")
    assert not recognises(b'{"a": {"arrival_s": 1, "isl": 2, "osl": 3}}')


def recorded(folder: Path, store: Path, **said: str) -> tuple[str, Any]:
    """The outcome of an ingest of ``folder``, and what is stored."""
    (source,) = sources_of([folder], **said)  # type: ignore[arg-type]
    outcome = ingest_source(store, source).outcome
    with open_store(store, read_only=True) as opened:
        return outcome, read_stored(opened, folder.name)


@pytest.mark.slow
def test_a_table_becomes_a_recording_sorted_by_arrival(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requests.csv").write_text(TABLE)
    outcome, recording = recorded(folder, tmp_path / "store", model="my/model")
    assert (outcome, recording.model, recording.ground_truth) == ("new", "my/model", RECORDED)
    assert recording.requests["request_id"].to_list() == ["b", "a"]
    assert recording.requests["arrival_us"].to_list() == [0, 400_000]
    assert set(recording.requests["output_tokens_source"]) == {"server usage"}


def test_a_table_without_latencies_is_an_arrival_trace(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requests.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,2,3\n")
    assert recorded(folder, tmp_path / "store")[1].ground_truth == ARRIVALS


@pytest.mark.slow
def test_what_is_said_of_a_table_is_remembered_until_something_else_is_said(tmp_path: Path) -> None:
    """The first reading takes E2E for milliseconds, the last for seconds."""
    folder, store = tmp_path / "mine", tmp_path / "store"
    folder.mkdir()
    (folder / "requests.csv").write_text("sent,isl,osl,total\n1,2,3,4\n")
    said = "arrival=sent:s,e2e=total:ms"
    assert recorded(folder, store, columns=said, model="m")[0] == "new"
    assert recorded(folder, store)[0] == "unchanged"
    (folder / "requests.csv").write_text("sent,isl,osl,total\n1,2,3,5\n")
    outcome, recording = recorded(folder, store)
    assert (outcome, recording.model, recording.requests["e2e_us"].to_list()) == ("replaced", "m", [5_000])
    assert {file.name: file.kind for file in recording.files}["--columns"] == f"given: {said}"
    outcome, recording = recorded(folder, store, columns="arrival=sent:s,e2e=total:s")
    assert (outcome, recording.requests["e2e_us"].to_list()) == ("replaced", [5_000_000])


def test_columns_choose_the_table_among_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requests.csv").write_text("when,isl,osl,total\n1,2,3,4\n")
    (folder / "notes.csv").write_text("who,what\nx,y\n")
    (folder / "exp-config.yaml").write_text("model: m\n")
    with read_recording(sources_of([folder], columns="arrival=when:s,e2e=total:ms")[0]) as recording:
        assert recording.requests.height == 1
    with pytest.raises(
        RecordingError, match=r"no file has columns of --columns arrival=begin:s; notes.csv has columns"
    ):
        recorded(folder, tmp_path / "store", columns="arrival=begin:s")


def test_a_file_of_no_known_format_is_told_what_is_known_and_how_to_say_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requests.csv").write_text("sent,in,out\n1,2,3\n")
    with pytest.raises(RecordingError) as refused:
        recorded(folder, tmp_path / "store")
    assert "requests.csv has columns sent, in, out: say which is which, e.g. --columns arrival=COLUMN:s" in str(
        refused.value
    )
    assert "formats that are known: server logs, otlp, " in str(refused.value)


def test_requests_without_arrivals_of_which_some_were_always_in_flight(tmp_path: Path) -> None:
    """Two at once, in the order of the table: the third is sent when the second ends, the fourth as the first ends."""
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = ["100,10,50,900", "100,10,50,300", "100,10,50,800", "100,10,50,100", "100,10,50,"]
    (folder / "requests.csv").write_text("\n".join(["prompt_tokens,output_tokens,ttft_ms,e2e_ms", *rows, ""]))
    with read_recording(sources_of([folder], columns="arrival=2:in-flight")[0]) as recording:
        assert recording.requests["arrival_us"].to_list() == [0, 0, 300_000, 900_000]
        assert recording.requests["e2e_us"].to_list() == [900_000, 300_000, 800_000, 100_000]
        assert [clock.placed for clock in recording.clocks] == [REBUILT]
        assert [file.rejected_count for file in recording.files if file.name == "requests.csv"] == [1]
    for wrong in ("arrival=0:in-flight", "arrival=many:in-flight", "end=2:in-flight"):
        with pytest.raises(RecordingError):
            sources_of([folder], columns=wrong)


@pytest.mark.parametrize("by_end", [False, True])
def test_a_file_in_the_order_of_ends_is_known_by_the_lengths_of_its_first_rows(tmp_path: Path, by_end: bool) -> None:
    """64 clients, 20 ms a token: all send at 0, so in the order of ends the first rows have ever longer outputs."""
    outputs, free_us, rows = np.random.default_rng(1).integers(10, 500, 640), [0] * 64, []
    for tokens in outputs.tolist():
        sent_us = heappushpop(free_us, free_us[0] + 20_000 * tokens)
        rows.append((sent_us + 20_000 * tokens, tokens))
    lines = [f"100,{tokens},50,{20 * tokens}" for _, tokens in (sorted(rows) if by_end else rows)]
    (tmp_path / "r.csv").write_text("\n".join(["prompt_tokens,output_tokens,ttft_ms,e2e_ms", *lines, ""]))
    with read_recording(sources_of([tmp_path / "r.csv"], columns="arrival=64:in-flight")[0]) as recording:
        assert any("order of sends" in lack for lack in recording.missing) == by_end
