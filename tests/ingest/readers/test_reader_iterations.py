"""Iteration lines of the server's log, in both forms: what every step computed."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest
from builders import recorded_file
from growth import ONE_PASS, growth

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import oldest_first
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.iterations import IterationLines, IterationsRead
from blis_replay.ingest.readers.server.log import recognises
from blis_replay.ingest.scratch import Scratch


def line(index: int, counts: tuple[int, int, int, int] = (0, 0, 1, 1), engine: int = 0, more: str = "") -> str:
    """As vLLM 0.32.0 on a CPU has it."""
    prefix = "(APIServer pid=10445) INFO 11-22 09:39:08 [loggers.py:199]"
    return f"{prefix} Engine {engine:03}: {said(index, counts)}{more}, CPU KV cache usage: 0.4%"


def said(index: int, counts: tuple[int, int, int, int] = (0, 0, 1, 1)) -> str:
    names = ("context requests", "context tokens", "generation requests", "generation tokens")
    listed = ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))
    return f"Iteration({index}): {listed}, iteration elapsed time: 6.51 ms"


def read(folder: Path, *lines: str) -> tuple[IterationsRead, RecordedFile]:
    file, found = recorded_file(folder, "\n".join(lines)), IterationLines(Scratch())
    taken = [found.take(file, i, text.encode()) for i, text in enumerate(lines, 1)]
    assert all(taken)
    return found.done(), file


def test_a_line_of_the_api_server_keeps_every_number(tmp_path: Path) -> None:
    found, file = read(tmp_path, line(7, (2, 252, 3, 3), engine=1))
    assert found.rows.frame().row(0, named=True) == {
        "engine": 1,
        "iteration": 7,
        "prefill_requests": 2,
        "prefill_tokens": 252,
        "decode_requests": 3,
        "decode_tokens": 3,
        "elapsed_us": 6510,
        "kv_usage": 0.004,
        "dummy": False,
        "logged_us": 0,
        "start_us": None,
        "uncertainty_us": None,
    }
    assert file.tally.records == 1


def test_a_line_of_the_engine_core_has_no_usage_and_the_engine_in_its_process(tmp_path: Path) -> None:
    """December 2025 to June 2026 (stock-vllm.md); the process is called so where there are several engines."""
    core = "INFO 02-11 10:00:00 [core.py:349]"
    found, _file = read(tmp_path, f"(EngineCore_DP1 pid=1) {core} {said(515)}", f"(EngineCore pid=1) {core} {said(3)}")
    assert found.rows.select("engine", "iteration", "kv_usage").rows() == [(0, 3, None), (1, 515, None)]


def test_a_dummy_step_is_one_without_requests(tmp_path: Path) -> None:
    found, _file = read(tmp_path, line(0, (0, 0, 0, 0), more=" (dummy)"), line(1))
    assert found.rows.select("iteration", "dummy", "kv_usage").rows() == [(0, True, 0.004), (1, False, 0.004)]


def test_gaps_are_counted_for_each_engine(tmp_path: Path) -> None:
    """Engine 0 lacks 2 and 3; of engine 1 the log was cut off at its beginning: 0 to 4 are missing."""
    found, _file = read(tmp_path, line(0), line(5, engine=1), line(1), line(4), line(6, engine=1))
    assert found.rows.select("engine", "iteration").rows() == [(0, 0), (0, 1), (0, 4), (1, 5), (1, 6)]
    assert found.remarks == ("2 iterations of engine 0, the first 2", "5 iterations of engine 1, the first 0")


def test_only_the_last_start_of_an_engine_counts(tmp_path: Path) -> None:
    found, _file = read(tmp_path, line(0), line(1), line(2), line(0, (1, 9, 0, 0)), line(1))
    assert found.rows.select("iteration", "prefill_tokens").rows() == [(0, 9), (1, 0)]
    assert found.remarks == ("3 iterations of earlier starts of the server: not used, the last one is",)


def test_a_line_that_stands_there_twice_counts_once(tmp_path: Path) -> None:
    found, _file = read(tmp_path, line(0), line(0), line(1))
    assert found.rows["iteration"].to_list() == [0, 1]
    assert found.remarks == ("1 iteration lines that stand there twice: counted once",)


def test_a_cut_line_is_rejected_and_other_lines_are_left_to_others(tmp_path: Path) -> None:
    cut = line(1)[:-45]
    found, file = read(tmp_path, line(0), cut)
    assert found.rows.height == 1
    assert file.tally.rejected == [("line 2", "an iteration line that is cut off, or of another form")]
    assert not IterationLines(Scratch()).take(file, 3, b"INFO Iteration(3) of something else")


def test_what_follows_the_usage_is_counted_as_not_read(tmp_path: Path) -> None:
    found, _file = read(tmp_path, line(0), line(1) + ", 2 encoder inputs")
    assert found.remarks == ("what follows the KV usage in 1 iteration lines: not read",)


@pytest.mark.parametrize(("second", "after_us"), [("11-22 09:39:10", 2_000_000), ("11-23 09:39:08", 86_400_000_000)])
def test_stamps_have_whole_seconds_from_the_first(tmp_path: Path, second: str, after_us: int) -> None:
    found, _file = read(tmp_path, line(0), line(1).replace("11-22 09:39:08", second))
    assert found.rows["logged_us"].to_list() == [0, after_us]


def test_stamps_go_on_over_the_end_of_a_year(tmp_path: Path) -> None:
    old, new = (
        line(i).replace("11-22 09:39:08", stamp) for i, stamp in enumerate(("12-31 23:59:58", "01-01 00:00:01"))
    )
    assert read(tmp_path, old, new)[0].rows["logged_us"].to_list() == [0, 3_000_000]


def test_a_rotated_log_is_read_oldest_first_and_its_parts_are_known_by_their_lines(tmp_path: Path) -> None:
    parts = {"vllm.log.2.gz": [line(0), line(1)], "vllm.log.1": [line(2)], "vllm.log": [line(3)]}
    for name, lines in parts.items():
        content = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        assert recognises(content)
    (tmp_path / "trace.csv").write_text("")
    files = [RecordedFile(tmp_path / name, name) for name in sorted(parts)]
    assert [file.name for file in oldest_first(files)] == ["vllm.log.2.gz", "vllm.log.1", "vllm.log"]


def test_a_hostile_line_takes_time_in_proportion_to_its_length(tmp_path: Path) -> None:
    def take(length: int) -> None:
        text = b"Engine 0: Iteration(1): 1 context requests, " * (length // 40)
        IterationLines(Scratch()).take(RecordedFile(tmp_path / "x", "x"), 1, text)

    assert growth(take, 100_000) < ONE_PASS


@pytest.mark.parametrize(("name", "steps", "prefill_tokens"), [("A", 6094, 58_217), ("C", 1381, 87_803)])
def test_every_iteration_of_vllm_0_32(data_pack: Path, name: str, steps: int, prefill_tokens: int) -> None:
    """The recorded truth, steplog.jsonl, has as many steps: 0 to 6,093 and 0 to 1,380.

    A: 59,759 prompt tokens of the client's requests and 3 * 126 of the warm-ups, less 15 hits of 128 tokens in the
    prefix cache.  C: 87,572 and 3 * 1,485, less 3 hits of 1,408.
    """
    with read_recording(data_pack / "live-vllm-0.32" / name) as recording:
        rows = recording.iterations.frame()
        assert rows["iteration"].to_list() == list(range(steps))
        assert rows.select(pl.sum("prefill_tokens")).item() == prefill_tokens
        assert rows["kv_usage"].null_count() == 0
