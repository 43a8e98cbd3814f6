"""Request tables and simulations of them."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError, ReplayError, UnknownNameError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.trace import Behaviours, EngineConfig, KvCacheGroup
from blis_replay_labs.synthetic.request_table import read_request_table
from blis_replay_labs.synthetic.simulation import (
    Simulation,
    choose_entry,
    read_engine,
    request_frame,
    simulate_table,
    step_frame,
    write_tables,
)
from blis_replay_labs.synthetic.text import summary

ENGINE = EngineConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=4096, async_scheduling=False)
# The coefficients of the worked examples of blis-semantics, section 11.
ENTRY = ModelEntry("some/Model", 1, LatencyModel("blackbox", 1_000_000, 10_000, 5_000), Lifecycle(100.0, 1.0, 20.0))


def release_of(*entries: ModelEntry) -> CoefficientRelease:
    """A release with these entries."""
    return CoefficientRelease("ours", "valid", "s", "s", "H100", "0" * 64, entries, fitted_on=())


def simulated(path: Path, engine: EngineConfig = ENGINE) -> Simulation:
    """The requests of a file on a small engine."""
    return simulate_table(read_request_table(path, engine.block_size), engine, release_of(ENTRY), ENTRY)


def write(folder: Path, name: str, content: str) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_text(content, "utf-8")
    return path


class TestReading:
    def test_the_three_forms_say_the_same(self, tmp_path: Path) -> None:
        """1.5 ms in each unit; two requests, the second with a prefix of two blocks."""
        csv_file = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens,hash_ids\n0,40,3,\n1500,40,2,7 9\n")
        jsonl = write(
            tmp_path,
            "r.jsonl",
            '{"arrival_ms": 0, "prompt_tokens": 40, "output_tokens": 3}\n\n'
            '{"arrival_ms": 1.5, "prompt_tokens": 40, "output_tokens": 2, "hash_ids": [7, 9]}\n',
        )
        parquet = tmp_path / "r.parquet"
        pl.DataFrame(
            {"arrival_s": [0.0, 0.0015], "prompt_tokens": [40, 40], "output_tokens": [3, 2], "block_keys": [[], [7, 9]]}
        ).write_parquet(parquet)
        for path in (csv_file, jsonl, parquet):
            trace = read_request_table(path, 16).trace
            assert trace.arrival_us.tolist() == [0, 1500]
            assert trace.prompt_tokens.tolist() == trace.prefill_tokens.tolist() == [40, 40]
            assert trace.output_tokens.tolist() == [3, 2]
            assert trace.block_keys is not None
            assert trace.block_keys.count.tolist() == [0, 2]

    def test_requests_are_sorted_by_arrival_and_answered_in_the_order_of_the_file(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, "r.csv", "request_id,arrival_us,prompt_tokens,output_tokens\nlate,50000,100,1\nearly,0,64,1\n"
        )
        simulation = simulated(path)
        assert simulation.table.trace.prompt_tokens.tolist() == [64, 100]
        frame = request_frame(simulation)
        assert frame["request_id"].to_list() == ["late", "early"]
        assert frame["prompt_tokens"].to_list() == [100, 64]

    def test_known_hits_are_not_computed(self, tmp_path: Path) -> None:
        path = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens,cached_tokens\n0,100,1,48\n")
        assert read_request_table(path, 16).trace.prefill_tokens.tolist() == [52]

    def test_equal_identities_after_different_blocks_are_different_tokens(self, tmp_path: Path) -> None:
        """Block 9 after block 7 is not block 9 after block 8."""
        path = write(
            tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens,block_keys\n0,40,1,7 9\n1,40,1,8 9\n2,40,1,7 9\n"
        )
        keys = read_request_table(path, 16).trace.block_keys
        assert keys is not None
        first, second, third = (keys.keys[s : s + 2].tolist() for s in keys.start)
        assert first == third
        assert not set(first) & set(second)

    def test_columns_without_a_meaning_are_named(self, tmp_path: Path) -> None:
        path = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens,user\n0,10,1,a\n")
        assert read_request_table(path, 16).ignored == ("user",)

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ("0,0,1,,,", "prompt_tokens is '0'; write a whole number from 1 on"),
            ("0,10,,,,", "output_tokens is missing"),
            ("0,10,x,,,", "output_tokens is 'x'"),
            ("0,10,1.5,,,", "output_tokens is '1.5'"),
            ("-1,10,1,,,", "arrival_us is '-1'"),
            (",10,1,,,", "has no arrival; give one of arrival_us, arrival_ms, arrival_s"),
            ("0,10,1,10,,", "cached_tokens is 10 of 10; the last prompt token is always computed"),
            ("0,10,1,,high,", "priority is 'high'"),
            ("0,40,1,,,1 2 3", "3 block identities, but its 41 tokens fill 2 blocks of 16"),
            ("0,40,1,,,1 b", "block_keys holds 'b'"),
            ("0,40,1,16,,1 2", "both block identities and cached_tokens"),
            ("0,10", "2 columns where the header has 6"),
        ],
    )
    def test_what_is_amiss_has_file_and_line(self, tmp_path: Path, row: str, problem: str) -> None:
        header = "arrival_us,prompt_tokens,output_tokens,cached_tokens,priority,block_keys\n0,10,1,,,\n"
        path = write(tmp_path, "r.csv", header + row + "\n")
        with pytest.raises(RecordingError) as raised:
            read_request_table(path, 16)
        assert str(raised.value).startswith(f"{path}, line 3: ")
        assert problem in str(raised.value)

    def test_places_in_json_lines_and_parquet(self, tmp_path: Path) -> None:
        jsonl = write(tmp_path, "r.jsonl", '\n{"arrival_s": 1e400, "prompt_tokens": 1, "output_tokens": 1}\n')
        with pytest.raises(RecordingError, match=r"line 2: "):
            read_request_table(jsonl, 16)
        parquet = tmp_path / "r.parquet"
        pl.DataFrame({"arrival_us": [0, 1], "prompt_tokens": [1, None], "output_tokens": [1, 1]}).write_parquet(parquet)
        with pytest.raises(RecordingError, match=r"row 2: prompt_tokens is missing"):
            read_request_table(parquet, 16)

    @pytest.mark.parametrize(
        ("name", "content", "problem"),
        [
            ("r.csv", "", "no header line"),
            ("r.csv", "arrival_us,prompt_tokens,output_tokens\n", "no requests"),
            ("r.csv", "arrival_us,arrival_us\n", "line 1: no columns that each have a name of their own"),
            ("r.csv", "arrival_us,arrival_s,prompt_tokens,output_tokens\n1,1,1,1\n", "has arrival_us and arrival_s"),
            ("r.jsonl", "[" * 100_000 + "\n", "line 1: no columns"),
            ("r.jsonl", "[1]\n", "line 1: no columns"),
            ("r.jsonl", '{"prompt_tokens": 1}\n[1]\n', "not a JSON object|has no arrival"),
            ("r.parquet", "PAR1 or not", "no sound Parquet"),
        ],
    )
    def test_no_table_at_all(self, tmp_path: Path, name: str, content: str, problem: str) -> None:
        with pytest.raises(RecordingError, match=problem) as raised:
            read_request_table(write(tmp_path, name, content), 16)
        assert "\n" not in str(raised.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        for name in ("r.csv", "r.jsonl", "r.parquet"):
            with pytest.raises(RecordingError, match=r"cannot be read \(No such file or directory\)"):
                read_request_table(tmp_path / name, 16)

    def test_a_damaged_parquet_file(self, tmp_path: Path) -> None:
        """One byte in thirteen is turned over, each by itself; the table is read, or refused in one line."""
        path = tmp_path / "r.parquet"
        pl.DataFrame({"arrival_us": [0, 1], "prompt_tokens": [5, 6], "output_tokens": [1, 1]}).write_parquet(path)
        sound = path.read_bytes()
        for i in range(0, len(sound), 13):
            path.write_bytes(sound[:i] + bytes([sound[i] ^ 0xFF]) + sound[i + 1 :])
            try:
                assert len(read_request_table(path, 16).trace) <= 2
            except RecordingError as error:
                assert "\n" not in str(error)

    @given(st.sampled_from(["r.csv", "r.jsonl", "r.parquet"]), st.binary(max_size=300))
    def test_any_bytes_are_read_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
    ) -> None:
        path = tmp_path_factory.mktemp("table") / name
        path.write_bytes(content)
        with pytest.raises(RecordingError) as raised:
            read_request_table(path, 16)
        assert "\n" not in str(raised.value)

    @pytest.mark.slow
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 10**12),
                st.integers(1, 500),
                st.integers(1, 500),
                st.integers(-5, 5),
                st.lists(st.integers(-(2**70), 2**70), max_size=4),
            ),
            min_size=1,
            max_size=20,
        )
    )
    def test_what_is_written_is_read(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, int, list[int]]]
    ) -> None:
        """CSV and JSON lines give equal traces; arrivals come out sorted, ties in the order of the file."""
        folder = tmp_path_factory.mktemp("table")
        names = ("arrival_us", "prompt_tokens", "output_tokens", "priority", "block_keys")
        rows = [(*row[:4], row[4][: (row[1] + row[2]) // 16]) for row in rows]
        text = io.StringIO()
        csv.writer(text).writerows([names, *((*row[:4], " ".join(map(str, row[4]))) for row in rows)])
        tables = [
            read_request_table(write(folder, "r.csv", text.getvalue()), 16),
            read_request_table(
                write(folder, "r.jsonl", "".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows)), 16
            ),
        ]
        ordered = sorted(range(len(rows)), key=lambda i: rows[i][0])
        for table in tables:
            assert table.rows.tolist() == ordered
            assert table.trace.arrival_us.tolist() == [rows[i][0] for i in ordered]
            assert table.trace.priority is not None
            assert table.trace.priority.tolist() == [rows[i][3] for i in ordered]
            keys = table.trace.block_keys
            assert (keys.count.tolist() if keys else [0] * len(rows)) == [len(rows[i][4]) for i in ordered]


class TestSimulating:
    def test_a_repeated_prompt_is_found_in_the_simulated_cache(self, tmp_path: Path) -> None:
        """64 tokens are 4 blocks; the last token is always computed, so 3 blocks of 16 hit: 48 of 128."""
        table = "arrival_us,prompt_tokens,output_tokens,block_keys\n0,64,2,1 2 3 4\n100000,64,2,1 2 3 4\n"
        engine = EngineConfig(8, 2048, 4096, async_scheduling=False, num_gpu_blocks=11)
        simulation = simulated(write(tmp_path, "r.csv", table), engine)
        assert request_frame(simulation)["cached_tokens"].to_list() == [0, 48]
        values = summary(simulation)
        assert values["prefix_hit_rate"] == 48 / 128
        # Ten usable blocks; 65 computed tokens take 5 (the last of 66 is never computed).
        assert values["min_free_blocks"] == 5

    def test_a_request_that_can_never_be_served_has_its_line(self, tmp_path: Path) -> None:
        """Line 3 is the earlier arrival; 4,096 tokens leave no room; 200 of them need 13 blocks of 10."""
        path = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens\n9,10,1\n0,4096,1\n")
        with pytest.raises(RecordingError, match=r"line 3: a prompt of 4096 tokens leaves no room in max_model_len"):
            simulated(path)
        path = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens\n9,10,1\n0,200,1\n")
        with pytest.raises(RecordingError, match=r"line 3: needs 13 KV blocks, and the engine has 10"):
            simulated(path, EngineConfig(8, 2048, 4096, async_scheduling=False, num_gpu_blocks=11))

    def test_tables_are_written_in_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """7 steps, 3 a part: the files hold what one frame holds."""
        monkeypatch.setattr("blis_replay_labs.synthetic.simulation._STEPS_A_PART", 3)
        simulation = simulated(write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens\n0,100,7\n"))
        write_tables([simulation], tmp_path / "out")
        assert pl.read_parquet(tmp_path / "out" / "steps.parquet").equals(step_frame(simulation))
        assert len(step_frame(simulation)) == 7
        assert pl.read_parquet(tmp_path / "out" / "requests.parquet").equals(request_frame(simulation))


class TestEngineFile:
    NEEDED = "max_num_seqs: 8\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: false\n"

    def test_names_of_vllm_with_its_defaults(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, "e.yaml", self.NEEDED.replace("max_num_seqs", "max-num-seqs") + "tensor_parallel_size: 2\n"
        )
        given = read_engine(path)
        assert given.engine == ENGINE
        assert given.tensor_parallelism == 2

    @pytest.mark.parametrize(
        ("more", "problem"),
        [
            ("max_seqs: 3\n", "max_seqs"),
            ("block_size: big\n", "block_size"),
            ("num_gpu_blocks: 1\n", "num_gpu_blocks is 1; it must be at least 2"),
            ("scheduling_policy: lottery\n", "scheduling_policy"),
        ],
    )
    def test_refused(self, tmp_path: Path, more: str, problem: str) -> None:
        path = write(tmp_path, "e.yaml", self.NEEDED + more)
        with pytest.raises(Exception, match=problem) as raised:
            read_engine(path)
        assert type(raised.value).__name__ in ("RecordingError", "TraceError")
        assert str(path) in str(raised.value)

    def test_what_changes_no_schedule_is_read_over_and_what_is_not_simulated_is_refused(self, tmp_path: Path) -> None:
        more = 'seed: 42\nvllm_version: 0.15.1\ndata_parallel_size: 1\nkv_cache_dtype: auto\nblock_size: "16"\n'
        behaviours = Behaviours(  # of 0.14 and 0.15
            aborts_before_tokens=True, dense_ranks_apart=True, drafts_end_with_preemption=True
        )
        assert read_engine(write(tmp_path, "e.yaml", self.NEEDED + more)).engine == replace(
            ENGINE, behaviours=behaviours
        )
        with pytest.raises(ReplayError, match="not simulated: pipeline_parallel_size 4; in the replay one batch"):
            read_engine(write(tmp_path, "e.yaml", self.NEEDED + "pipeline_parallel_size: 4\n"))
        grouped = self.NEEDED + "kv_cache_groups: window 64, full\nvllm_version: "
        groups = (KvCacheGroup("window", 64), KvCacheGroup("full"))
        assert read_engine(write(tmp_path, "e.yaml", grouped + "0.32.0\n")).engine.kv_cache_groups == groups
        with pytest.raises(ReplayError, match="kv_cache_groups"):  # not compared with this release
            read_engine(write(tmp_path, "e.yaml", grouped + "0.11.0\n"))

    def test_what_is_needed(self, tmp_path: Path) -> None:
        with pytest.raises(ReplayError, match="max_num_batched_tokens, max_model_len, async_scheduling missing"):
            read_engine(write(tmp_path, "e.yaml", "max_num_seqs: 8\n"))
        with pytest.raises(RecordingError):
            read_engine(tmp_path / "nowhere.yaml")


class TestChoosingCoefficients:
    LARGE = ModelEntry("some/Model", 2, ENTRY.latency, ENTRY.lifecycle)
    OTHER = ModelEntry("other/Thing", 1, ENTRY.latency, ENTRY.lifecycle, applies_to=("thing-hf-*",))

    def test_by_name_last_part_pattern_and_parallelism(self) -> None:
        release = release_of(ENTRY, self.LARGE, self.OTHER)
        assert choose_entry(release, "Other/thing", None) == self.OTHER
        assert choose_entry(release, "thing", None) == self.OTHER
        assert choose_entry(release, "thing-hf-*", None) == self.OTHER
        assert choose_entry(release, "model", 2) == self.LARGE
        assert choose_entry(release_of(ENTRY), None, None) == ENTRY

    def test_none_or_several(self) -> None:
        release = release_of(ENTRY, self.LARGE)
        with pytest.raises(UnknownNameError, match="has several models: some/Model tp 1, some/Model tp 2; choose one"):
            choose_entry(release, "model", None)
        there = "it has: some/Model tp 1, some/Model tp 2; choose one with --model"
        for model, parallelism, asked in (("mixtral", None, "mixtral"), ("model", 8, "model tp 8")):
            with pytest.raises(UnknownNameError, match=f"ours has no coefficients for {asked}; {there}"):
                choose_entry(release, model, parallelism)
        with pytest.raises(UnknownNameError, match=f"ours has no coefficients for any model tp 8; {there}"):
            choose_entry(release, None, 8)


def test_equal_tables_give_equal_results(tmp_path: Path) -> None:
    """Byte for byte, also the files."""
    rng = np.random.default_rng(7)
    lines = [
        f"{a},{p},{o}"
        for a, p, o in zip(
            np.sort(rng.integers(0, 10**7, 50)), rng.integers(1, 900, 50), rng.integers(1, 50, 50), strict=True
        )
    ]
    path = write(tmp_path, "r.csv", "arrival_us,prompt_tokens,output_tokens\n" + "\n".join(lines))
    for name in ("one", "two"):
        write_tables([simulated(path)], tmp_path / name)
    for table in ("requests.parquet", "steps.parquet"):
        assert (tmp_path / "one" / table).read_bytes() == (tmp_path / "two" / table).read_bytes()


def test_requests_of_one_session_are_told_by_its_name(tmp_path: Path) -> None:
    """Numbered in the order of the trace; a request without a session is one by itself."""
    text = "arrival_s,prompt_tokens,output_tokens,session\n2,1,1,b\n1,1,1,a\n3,1,1,\n4,1,1,a\n5,1,1,\n"
    (tmp_path / "t.csv").write_text(text)
    table = read_request_table(tmp_path / "t.csv", 16)
    assert table.sessions is not None
    first, second, third, fourth, fifth = table.sessions.tolist()
    assert first == fourth
    assert len({first, second, third, fifth}) == 4
    assert table.ignored == ()
    assert table.of_open_load().ignored == ("session",)
