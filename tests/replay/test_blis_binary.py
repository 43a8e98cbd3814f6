"""The BLIS binary as a simulator, with stand-ins for the binary."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blis_runs import BLACKBOX, DELAYS, called, plan_of, release_of, run_with, small_recording
from blis_stand_in import HELP_BLACKBOX, HELP_CURRENT, HELP_OLDER, write_stand_in
from hypothesis import given
from hypothesis import strategies as st
from recordings import make_recording

from blis_replay.base.errors import ReleaseError, ReplayError
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay.replay.blis_binary import OWN, BlisBinary, BlisError, find_build, own_release
from blis_replay.replay.blis_files import COLUMNS, read_results, shared_prefixes
from blis_replay.validate.comparison.compare import compare_replay

NO_BUILD = r"is not a blackbox model .* which no BLIS build runs"


class TestAnswers:
    def test_latencies_are_those_of_the_binary(self, tmp_path: Path) -> None:
        """The stand-in says 20 ms + 4 gaps of 10 ms, and the recording has just that."""
        run = run_with(write_stand_in(tmp_path), small_recording())
        assert (run.simulator, run.ttft_us.tolist(), run.e2e_us.tolist()) == ("blis", [20_000] * 3, [60_000] * 3)
        comparison = compare_replay(run)
        assert [comparison.metrics[m]["mean"].error for m in ("e2e", "ttft", "itl", "tpot")] == [0.0] * 4
        assert comparison.verdict == "UNDECIDED"  # three requests

    def test_itl_quantiles_are_null_with_a_reason(self, tmp_path: Path) -> None:
        cells = compare_replay(run_with(write_stand_in(tmp_path), small_recording())).metrics["itl"]
        assert cells["mean"].b_us == 10_000.0
        for name in ("p50", "p90", "p99"):
            assert cells[name].b_us is None
            assert "no times of single tokens" in str(cells[name].reason)

    def test_a_post_request_delay_is_added_to_e2e_once(self, tmp_path: Path) -> None:
        """BLIS's blackbox has no such delay; 60 ms + 7 ms."""
        release = release_of(lifecycle=replace(DELAYS, post_request_us=7_000.0))
        run = run_with(write_stand_in(tmp_path, help_text=HELP_BLACKBOX), small_recording(), release)
        assert run.e2e_us.tolist() == [67_000] * 3


class TestFlags:
    def test_current_build(self, tmp_path: Path) -> None:
        """Times from zero, an explicit horizon, no delay of the cache signal, the build's folder."""
        path = write_stand_in(tmp_path)
        run_with(path, small_recording(num_gpu_blocks=1001))
        call = called(path)
        option = dict(zip(call["arguments"][1::2], call["arguments"][2::2], strict=True))
        assert call["arguments"][0] == "replay"
        assert call["folder"] == str(tmp_path)
        expected = {
            "--model": "some/model",
            "--hardware": "H100",
            "--tp": "1",
            "--total-kv-blocks": "1000",
            "--block-size-in-tokens": "16",
            "--max-num-seqs": "128",
            "--max-num-batched-tokens": "2048",
            "--max-model-len": "4096",
            "--horizon": "9000000000000",
            "--cache-signal-delay": "0",
        }
        assert {name: option[name] for name in expected} == expected
        assert "--latency-model" not in option

    def test_older_build_and_a_blackbox_release(self, tmp_path: Path) -> None:
        path = write_stand_in(tmp_path, help_text=HELP_OLDER)
        run_with(path, small_recording(), release_of())
        arguments = called(path)["arguments"]
        option = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        assert (option["--max-num-running-reqs"], option["--max-num-scheduled-tokens"]) == ("128", "2048")
        assert not {"--max-num-seqs", "--max-num-batched-tokens", "--cache-signal-delay"} & set(option)
        assert option["--latency-model"] == "blackbox"
        assert (option["--alpha-coeffs"], option["--beta-coeffs"]) == ("1600,3.5,1800", "6900,17.7,2.8")

    def test_an_engine_that_blis_cannot_be(self, tmp_path: Path) -> None:
        """Priorities, no chunked prefill, and a threshold that an old build does not know."""
        path = write_stand_in(tmp_path, help_text=HELP_CURRENT.replace("--long-prefill-token-threshold", "--long"))
        build, plan = find_build(str(path)), plan_of(small_recording())
        blis = BlisBinary(build, own_release(build, OWN), OWN)
        for change, problem in (
            ({"scheduling_policy": "priority"}, "scheduled by priority"),
            ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, "BLIS always chunks"),
            ({"long_prefill_token_threshold": 512}, "no --long-prefill-token-threshold"),
        ):
            with pytest.raises(BlisError, match=problem):
                blis.serve(replace(plan, engine=replace(plan.engine, **change)))

    def test_a_latency_model_of_the_build_by_name(self, tmp_path: Path) -> None:
        """Which are there stands in its help; without a name it runs the one that it runs by itself."""
        path = write_stand_in(tmp_path, help_text=HELP_CURRENT)
        run = run_with(path, small_recording(), model="roofline")
        assert "--latency-model roofline" in " ".join(called(path)["arguments"])
        assert run.release.name == "blis-roofline-model"
        run_with(path, small_recording())
        assert "--latency-model" not in called(path)["arguments"]
        with pytest.raises(BlisError, match=r"no latency model 'crossmodel'; its help: .*: roofline, trained-physics"):
            run_with(path, small_recording(), model="crossmodel")

    @pytest.mark.parametrize(
        ("help_text", "latency", "problem"),
        [
            (HELP_CURRENT, BLACKBOX, "has no blackbox model and cannot run release ours; use a build"),
            (HELP_BLACKBOX, replace(BLACKBOX, per_context_token_ns=10), NO_BUILD),
            (HELP_BLACKBOX, LatencyModel("floor", 0, 0, 0, floor_ns=9_000_000), NO_BUILD),
        ],
    )
    def test_a_release_that_the_build_does_not_run(
        self, tmp_path: Path, help_text: str, latency: LatencyModel, problem: str
    ) -> None:
        path = write_stand_in(tmp_path, help_text=help_text)
        with pytest.raises(ReleaseError, match=problem):
            run_with(path, small_recording(), release_of(latency))


class TestTrace:
    def test_27_columns_in_the_order_of_the_format(self, tmp_path: Path) -> None:
        path = write_stand_in(tmp_path)
        run_with(path, small_recording())
        call = called(path)
        assert tuple(call["rows"][0]) == COLUMNS
        assert len(COLUMNS) == 27
        assert "time_unit: microseconds" in call["header"]
        assert [row["arrival_time_us"] for row in call["rows"]] == ["0", "1000000", "2000000"]
        assert [row["send_time_us"] for row in call["rows"]] == ["0", "1000000", "2000000"]
        assert {(row["input_tokens"], row["output_tokens"], row["deadline_us"]) for row in call["rows"]} == {
            ("100", "5", "0")
        }

    def test_a_client_that_gave_up_is_a_deadline(self, tmp_path: Path) -> None:
        """Sent at 1 s, given up 0.5 s later; BLIS leaves it out of its results."""
        recording = make_recording(
            {
                "arrival_us": [0, 1_000_000],
                "prompt_tokens": [100, 100],
                "output_tokens": [5, 5],
                "ttft_us": [20_000, None],
                "e2e_us": [60_000, 500_000],
                "status": ["ok", "timeout"],
            }
        )
        path = write_stand_in(tmp_path, 'write([a for a, r in zip(plain(), rows) if r["deadline_us"] == "0"])')
        run = run_with(path, recording)
        assert [row["deadline_us"] for row in called(path)["rows"]] == ["0", "1500000"]
        assert run.simulated.completed.tolist() == [True, False]

    def test_outputs_end_with_the_context(self, tmp_path: Path) -> None:
        """4,090 prompt tokens and a context of 4,096 leave room for 6, in vLLM as here."""
        recording = make_recording({"arrival_us": [0], "prompt_tokens": [4_090], "output_tokens": [50]})
        path = write_stand_in(tmp_path)
        assert run_with(path, recording).simulated.output_tokens.tolist() == [6]
        assert called(path)["rows"][0]["output_tokens"] == "6"

    def test_cached_prompts_are_prefix_groups(self, tmp_path: Path) -> None:
        """48 cached of 100, 53 of 101 (3 whole blocks), and none: one group of 48 tokens."""
        recording = make_recording(
            {
                "arrival_us": [0, 1, 2],
                "prompt_tokens": [100, 101, 90],
                "output_tokens": [5, 5, 5],
                "cached_prompt_tokens": [48, 53, 0],
            }
        )
        path = write_stand_in(tmp_path)
        run = run_with(path, recording)
        rows = called(path)["rows"]
        assert [row["prefix_length"] for row in rows] == ["48", "48", "0"]
        assert [row["input_tokens"] for row in rows] == ["52", "53", "90"]
        assert rows[0]["prefix_group"] == rows[1]["prefix_group"] != rows[2]["prefix_group"] == ""
        assert any("1 groups with a shared prefix" in line for line in run.simulated.differences)

    def test_block_identities_are_prefix_groups(self) -> None:
        """Blocks 0-1 are in three prompts, block 2 in two; a prompt of just 3 blocks keeps its last.

        Prompt of 48 with blocks 0, 1, 2; of 64 with 0, 1, 2, 3; of 40 with 0, 1.
        """
        keys = BlockKeys(
            np.array([0, 3, 7]), np.array([3, 4, 2]), np.array([0, 1, 2, 0, 1, 2, 3, 0, 1], np.int32), block_size=16
        )
        prompts = np.array([48, 64, 40])
        trace = RequestTrace(np.arange(3), prompts, prompts, np.ones(3, np.int64), np.full(3, NEVER_US), None, keys)
        plan = replace(plan_of(small_recording()), trace=trace)
        shared = shared_prefixes(plan)
        # The first keeps its third block to itself, so nobody shares block 2 with the second.
        assert shared.length.tolist() == [32, 32, 32]
        assert shared.group.tolist() == [1, 1, 1]


class TestBrokenBinaries:
    @pytest.mark.parametrize(
        ("content", "mode", "problem"),
        [
            (None, 0, "no such BLIS binary; give its path with --blis-binary"),
            (b"#!/bin/sh", 0o644, "is not an executable file"),
            (b"\x00\x01\x02 no program", 0o755, r"cannot be run \(Exec format error\)"),  # of another machine
            (b"#!/bin/sh\necho 'usage: true [ignored]'", 0o755, "its help names no --trace-header"),
        ],
    )
    def test_what_is_no_blis(self, tmp_path: Path, content: bytes | None, mode: int, problem: str) -> None:
        path = tmp_path / "blis"
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        with pytest.raises(BlisError, match=problem):
            find_build(str(path))

    def test_crash_shows_the_last_line_made_harmless(self, tmp_path: Path) -> None:
        path = write_stand_in(tmp_path, 'sys.stderr.write("goroutine 1\\npanic: \\x1b[31mnil map\\n\\n"); sys.exit(2)')
        with pytest.raises(BlisError) as raised:
            run_with(path, small_recording())
        assert str(raised.value) == (
            f"{path}: BLIS ended with exit code 2: panic: \\x1b[31mnil map; run it by hand, or use another build"
        )

    def test_a_hanging_binary_and_its_children_are_stopped(self, tmp_path: Path) -> None:
        child = tmp_path / "child"
        behaviour = f"""if (pid := os.fork()):
    open({str(child)!r}, "w").write(str(pid))
time.sleep(60)"""
        path = write_stand_in(tmp_path, behaviour)
        started = time.monotonic()
        with pytest.raises(BlisError, match="did not end within 1 s and was stopped; raise --simulator-timeout"):
            run_with(path, small_recording(), timeout_s=1.0)
        assert time.monotonic() - started < 10
        pid = int(child.read_text())
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                break
            time.sleep(0.02)
        else:
            os.kill(pid, 9)
            pytest.fail("the child of the binary is still alive")

    @pytest.mark.parametrize(
        ("behaviour", "problem"),
        [
            ("os.kill(os.getpid(), 9)", "BLIS was ended by signal 9: it said nothing"),
            ("pass", "wrote no results"),
            ('__import__("os").symlink("/dev/zero", option["--results-path"])', "wrote no results"),
            ('__import__("os").mkfifo(option["--results-path"])', "wrote no results"),
            ('__import__("os").mkdir(option["--results-path"])', "wrote no results"),
            ('open(option["--results-path"], "wb").write(bytes(range(256)))', "cannot be read"),
            ('open(option["--results-path"], "w").write("[" * 300_000)', "cannot be read"),
            ('write({"requests": []})', "cannot be read"),
            ("write([1])", "cannot be read"),
            ('write([a | {"request_id": 7} for a in plain()])', "request 7 was not asked for"),
            ("write(plain() + plain()[:1])", "request 0 was answered already"),
            ('write([a | {"ttft_us": -1} for a in plain()])', r"cannot be read.*\[0\]\.ttft_us"),
            ('write([a | {"e2e_us": float("nan")} for a in plain()])', "cannot be read"),
            ('write([a | {"e2e_us": 1} for a in plain()])', "has its first token after the last"),
            ('write([a | {"output_tokens": 4} for a in plain()])', "4 output tokens where 5 were asked for"),
        ],
    )
    def test_garbage(self, tmp_path: Path, behaviour: str, problem: str) -> None:
        with pytest.raises(ReplayError, match=problem) as raised:
            run_with(write_stand_in(tmp_path, behaviour), small_recording())
        assert "\n" not in str(raised.value)


@pytest.mark.slow
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["request_id", "ttft_us", "e2e_us", "output_tokens"]), inner)
        ),
    ).map(lambda document: json.dumps(document).encode())
)
def test_any_results_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever a binary writes, it is an answer or one line."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    path.write_bytes(content)
    try:
        results = read_results(path, np.array([5, 5]))
    except ReplayError as error:
        assert "\n" not in str(error)
    else:
        assert (results.ttft_us <= results.e2e_us).all()


def test_what_a_model_of_its_own_was_fitted_on_is_not_known(tmp_path: Path) -> None:
    """It names no recordings, which does not mean that there were none; BLIS says so of no model."""
    assert compare_replay(run_with(write_stand_in(tmp_path), small_recording())).use == "unknown"
