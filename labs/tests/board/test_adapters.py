"""Adapters: what other simulators are told, and that their answers come back request by request.

The simulators are stand-ins of a few lines, under the names and with the files of the real ones.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import make_recording

from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import KvCacheGroup
from blis_replay.ingest.recording import Recording
from blis_replay.replay.command import CommandError, step_times
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulators import SimulatorInputs
from blis_replay_labs.board.adapters.vidur import _as_one
from blis_replay_labs.board.simulators import adapted

RELEASE = load_release("h100-vllm-0.15.1")
# Answers in the order of random ids, as the real one: first token after 5 ms and 1 ms a block, 2 ms for each further.
DYNAMO = """
import json, sys
words = sys.argv[1:]
said = dict(zip(words[1::2], words[2::2]))
trace = [json.loads(line) for line in open(words[0])]
engine, profile = json.loads(said["--extra-engine-args"]), {}
if "planner_profile_data" in engine:
    import numpy
    profile = {name: values.tolist() for name, values in numpy.load(engine["planner_profile_data"]).items()}
json.dump({"engine": engine, "trace": trace, "profile": profile}, open(KEEP, "w"))
with open(said["--report-jsonl"], "w") as file:
    for row in reversed(trace):
        at, first = row["timestamp"], 5 + len(row["hash_ids"])
        json.dump({"arrival_time_ms": at, "first_admit_ms": at + 3, "ttft_ms": first, "terminal_status": "completed",
                   "e2e_latency_ms": first + 2 * (row["output_length"] - 1)}, file)
        file.write("\\n")
"""
# 10 ms and 100 us for each at once; a token a ms.
# It imports a module of the library whose name we have too (profile): none of our files stands in its way.
AICONFIGURATOR = """
import cProfile, json, types
def cli_estimate(**said):
    json.dump(said, open(KEEP, "w"))
    ttft = 10 + 0.1 * said["batch_size"]
    return types.SimpleNamespace(ttft=ttft, tpot=1.0, request_latency=ttft + 1.0 * (said["osl"] - 1))
"""
# A first token 20 ms after it is scheduled, which is 5 ms after the arrival, and 10 ms for each further one.
VIDUR = """
import csv, json, pathlib
def plain(value):
    return {name: plain(one) for name, one in vars(value).items()} if hasattr(value, "__dict__") else value
class Simulator:
    def __init__(self, config):
        self.said = plain(config)
    def run(self):
        trace, metrics = self.said["request_generator_config"], self.said["metrics_config"]
        rows = list(csv.DictReader(open(trace["trace_file"])))
        json.dump({"said": self.said, "trace": rows}, open(KEEP, "w"))
        assert self.said["cluster_config"]["replica_config"]["model_name"] != "some/Preempted"
        folder = pathlib.Path(metrics["output_dir"], "2026-01-01_00-00-00")
        folder.mkdir(parents=True)
        with open(folder / "request_metrics.csv", "w") as file:
            print("Request Id,request_e2e_time,request_scheduling_delay,prefill_e2e_time", file=file)
            for index, row in reversed(list(enumerate(rows))):
                print(index, 0.025 + 0.01 * (int(row["num_decode_tokens"]) - 1), 0.005, 0.025, sep=",", file=file)
"""
# Each type of the configuration keeps what it is given.
VIDUR_CONFIG = """
import types
def __getattr__(name):
    return type(name, (types.SimpleNamespace,), {})
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins keep what they were told; they are installed for the Python of this test."""
    keep = tmp_path / "kept.json"
    modules = {
        "dynamo/replay/__main__.py": DYNAMO,
        "aiconfigurator/cli/api.py": AICONFIGURATOR,
        "vidur/simulator.py": VIDUR,
        "vidur/config.py": VIDUR_CONFIG,
    }
    for name, text in modules.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"KEEP = {str(keep)!r}\n{text}")
    for name, version in (("ai_dynamo", "1.4.2"), ("aiconfigurator", "0.12.0"), ("vidur", "0.0.26")):
        folder = tmp_path / "site" / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return keep


def recording(model: str = "some/Model") -> Recording:
    """Three requests a second apart: 64, 40 and 64 prompt tokens, 11, 21 and 31 of output."""
    columns = {
        "arrival_us": [0, 1_000_000, 2_000_000],
        "prompt_tokens": [64, 40, 64],
        "output_tokens": [11, 21, 31],
        "ttft_us": [1_000, 3_000, 2_000],
        "e2e_us": [11_000, 23_000, 32_000],
    }
    return replace(make_recording(columns, engine={"num_gpu_blocks": 500}), model=model, tensor_parallelism=1)


def run(name: str, of: Recording) -> ReplayRun:
    return replay(of, RELEASE, simulator=adapted(name, SimulatorInputs(RELEASE, Path("no-store"), 60.0)))


def test_dynamo_gets_the_engine_arguments_and_a_hash_id_a_block(kept: Path) -> None:
    """Blocks of 16: 64 tokens are 4 of them, 40 are 3, so first tokens after 9, 8 and 9 ms."""
    answer = run("dynamo", recording())
    told = json.loads(kept.read_text())
    wanted = {"block_size": 16, "num_gpu_blocks": 500, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    assert wanted.items() <= told["engine"].items()
    assert "planner_profile_data" not in told["engine"]
    ids = [row["hash_ids"] for row in told["trace"]]
    assert [len(row) for row in ids] == [4, 3, 4]
    assert len({key for row in ids for key in row}) == 11  # nothing is known to be shared
    assert [row["timestamp"] for row in told["trace"]] == [0, 1000, 2000]
    assert answer.ttft_us.tolist() == [9_000, 8_000, 9_000]
    assert answer.e2e_us.tolist() == [29_000, 48_000, 69_000]
    assert answer.simulated.scheduled_us is not None
    assert answer.simulated.scheduled_us.tolist() == [3_000] * 3
    assert answer.simulator == "dynamo"
    assert "dynamo 1.4.2 does not model: asynchronous scheduling" in answer.simulated.differences
    assert answer.release.name == "as shipped"


@pytest.mark.slow
def test_dynamo_fitted_gets_the_step_times_of_the_coefficients(kept: Path) -> None:
    answer = run("dynamo-fitted", _mixtral())
    told = json.loads(kept.read_text())
    assert answer.release.name == RELEASE.name
    assert_adds_up_to_a_step(told["profile"])
    with pytest.raises(CommandError, match="the coefficients have no step times"):
        run("dynamo-fitted", recording())


def assert_adds_up_to_a_step(profile: dict[str, list[Any]]) -> None:
    """A pass of Dynamo takes the sum of two tables, and a prompt that it completes is one of the decodes.

    The shipped line for Mixtral says what a step with 512 prompt tokens and 24 decodes at 600 tokens of context takes;
    after it there are 25 decodes.  The fixed part of a step (17.6 ms) is in the sum once.
    """
    from scipy.interpolate import RegularGridInterpolator  # takes a twelfth of the time that collecting all tests takes

    latency = RELEASE.entry_for("mistralai/Mixtral-8x7B-v0.1", 2, "mixtral-test").latency
    assert isinstance(latency, LatencyModel)
    ns = latency.intercept_ns + 512 * latency.per_prefill_token_ns + 25 * latency.per_decode_token_ns
    ns += 25 * 600 * latency.per_context_token_ns
    table = (profile["decode_active_kv_tokens"], profile["decode_context_length"])
    decode_ms = RegularGridInterpolator(table, profile["decode_itl"])([25 * 600, 600])[0]
    prefill_ms = np.interp(512, profile["prefill_isl"], profile["prefill_ttft_ms"])
    assert decode_ms + prefill_ms == pytest.approx(ns / 1e6, rel=0.005)


def _mixtral() -> Recording:
    return replace(recording("mistralai/Mixtral-8x7B-v0.1"), tensor_parallelism=2, alias="mixtral-test")


def test_step_times_are_those_of_the_release() -> None:
    """The shipped line for Mixtral: the file says what a step, a prefill token, a decode and a context token take."""
    latency = RELEASE.entry_for("mistralai/Mixtral-8x7B-v0.1", 2, "mixtral-test").latency
    table = step_times(latency, 2048, 128)
    rows = {(row["prefill_tokens"], row["decode_requests"], row["context_tokens"]): row for row in table.to_dicts()}
    ns = latency.intercept_ns + 8 * latency.per_decode_token_ns + 8 * 512 * latency.per_context_token_ns  # type: ignore[union-attr]
    assert rows[0, 8, 8 * 512]["duration_us"] == pytest.approx(ns / 1000, abs=1)
    assert table["prefill_tokens"].max() == 2048
    assert table["decode_requests"].max() == 128


def test_step_times_of_a_chunk_hold_what_its_tokens_attend_to() -> None:
    """100 tokens after 512 attend to 100 * 512 + 100 * 101 / 2 = 56,250; 1 us for each 1,000 is 56.25 us more.

    Limits that stand on no grid are its last values: 100 tokens, 3 requests.
    """
    plain = LatencyModel("blackbox", 1_000_000, 10_000, 0)
    table = step_times(replace(plain, per_1000_attended_ns=1_000), 100, 3)
    rows = {(row["prefill_tokens"], row["prefill_context_tokens"]): row["duration_us"] for row in table.to_dicts()}
    assert rows[100, 512] == pytest.approx(1_000 + 100 * 10 + 56.25, abs=1)
    assert rows[100, 0] == pytest.approx(1_000 + 100 * 10 + 5.05, abs=1)
    assert table["prefill_tokens"].max() == 100
    assert sorted(set(table["decode_requests"])) == [0, 1, 2, 3]


def test_step_times_of_a_model_with_windows_are_of_a_mean_layer() -> None:
    """Of 512 tokens of context, in a window of 100 and in full: 306.  A prompt of 100 after 512: 10,000 and 56,250."""
    line = LatencyModel("blackbox", 1_000_000, 0, 0, per_context_token_ns=1_000, per_1000_attended_ns=1_000_000)
    table = step_times(line, 100, 3, (KvCacheGroup("window", 100), KvCacheGroup("full")))
    rows = {
        (row["prefill_tokens"], row["prefill_context_tokens"], row["context_tokens"]): row for row in table.to_dicts()
    }
    assert rows[0, 0, 2 * 512]["duration_us"] == pytest.approx(1_000 + 2 * 306, abs=1)
    assert rows[100, 512, 0]["duration_us"] == pytest.approx(1_000 + (10_000 + 56_250) / 2, abs=1)


def test_chunks_of_prompts_are_one_that_attends_to_as_many_tokens() -> None:
    """Two chunks of 100 after 0 and 400: 5,050 + 45,050 = 50,100 tokens attended to, as one of 200 after 150."""
    assert _as_one([(100, 0), (100, 400)]) == (150.0, 200)
    assert _as_one([]) == (0.0, 0)


@pytest.mark.slow
def test_modules_of_the_working_directory_are_not_run(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that is told a module, or code, prefers the folder that it is run in."""
    ran = tmp_path / "ran"
    folder = tmp_path / "working"
    folder.mkdir()
    for name in ("json", "csv", "zipfile", "email", "textwrap", "dynamo", "blis_replay", "profile", "vidur"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})")
    monkeypatch.chdir(folder)
    assert run("dynamo", recording()).ttft_us.tolist() == [9_000, 8_000, 9_000]
    assert run("aiconfigurator", recording()).ttft_us.tolist() == [10_100] * 3
    assert kept.exists()
    assert not ran.exists(), ran.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sys.stdout.write('garbage\\n' * 5_000_000); sys.exit('no such GPU')", "no such GPU"),
        ("import os; os._exit(0)", "wrote no report"),
        ("lines[0]['ttft_ms'] = float('nan')", "a time that is not a number"),
        ("lines[0]['ttft_ms'] = -1", "a time that is not a number"),
        ("lines[0]['ttft_ms'] = 'soon'", "TypeError: can't multiply"),
        ("del lines[0]['ttft_ms']", "KeyError: 'ttft_ms'"),
        ("lines = lines[1:]", "completed 2 of 3 requests"),
        ("lines = lines * 2", "completed 6 of 3 requests"),
        ("lines[0] = []", "TypeError: list indices"),
        ("lines[0]['terminal_status'] = 'dropped'", "completed 2 of 3 requests"),
        ("raise SystemExit(7)", "it said nothing"),
    ],
)
def test_what_another_simulator_does_wrong_is_one_line(kept: Path, change: str, said: str) -> None:
    module = kept.parent / "site" / "dynamo" / "replay" / "__main__.py"
    answers = (
        """
lines = [{"arrival_time_ms": row["timestamp"], "first_admit_ms": 3, "ttft_ms": 5, "terminal_status": "completed",
          "e2e_latency_ms": 9} for row in trace]
"""
        + change
        + """
with open(said["--report-jsonl"], "w") as file:
    file.write("".join(json.dumps(line) + "\\n" for line in lines))
"""
    )
    module.write_text(module.read_text().partition("with open")[0] + answers)
    with pytest.raises(CommandError, match=said) as error:
        run("dynamo", recording())
    assert "\n" not in str(error.value)


def test_a_python_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay_labs.board.simulators._LOOK_S", 0.2)
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nsleep 600\n")
    hangs.chmod(0o755)
    with pytest.raises(CommandError, match=r"did not end within 0.2 s; give the Python of the simulator"):
        run(f"dynamo:{hangs}", recording())
    monkeypatch.undo()  # a busy machine takes longer than that to see that it is none
    hangs.write_text("no program")
    with pytest.raises(CommandError, match="cannot be run"):
        run(f"dynamo:{hangs}", recording())


def test_aiconfigurator_is_asked_for_as_many_at_once_as_its_answer_keeps(kept: Path) -> None:
    """1.5 requests a second of about 30 ms: one at a time; 56 prompt tokens and 21 of output on average."""
    answer = run("aiconfigurator", recording())
    told = json.loads(kept.read_text())
    said = {"isl": 56, "osl": 21, "batch_size": 1, "tp_size": 1, "system_name": "h100_sxm", "prefix": 0}
    assert said.items() <= told.items()
    assert answer.ttft_us.tolist() == [10_100] * 3
    assert answer.e2e_us.tolist() == [20_100, 30_100, 40_100]


def test_vidur_gets_a_trace_and_the_engine_arguments(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds in and out; its own step times are fitted to the profile of the model on the GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = run("vidur", recording())
    told = json.loads(kept.read_text())
    wanted = {"arrived_at": "1.000000", "num_prefill_tokens": "40", "num_decode_tokens": "21"}
    wanted |= {"Date": "all", "Time": "1.000000", "PromptTokenCount": "40", "CompletionTokenCount": "21"}
    assert told["trace"][1] == wanted
    cluster, profile = told["said"]["cluster_config"], told["said"]["execution_time_predictor_config"]
    assert {"device": "h100", "model_name": "some/Model", "tensor_parallel_size": 1}.items() <= cluster[
        "replica_config"
    ].items()
    assert cluster["replica_scheduler_config"] == {"batch_size_cap": 128, "chunk_size": 2048}
    assert {"block_size": 16, "num_blocks": 500}.items() <= cluster["cache_config"].items()
    assert profile["model_profiling_dataset"] == "project-vajra/dev-staging-some-model-h100"
    assert profile["upload_predictions"] is False  # it would send what it fits to a hub
    assert answer.ttft_us.tolist() == [25_000] * 3
    assert answer.e2e_us.tolist() == [125_000, 225_000, 325_000]
    assert answer.simulated.scheduled_us is not None
    assert answer.simulated.scheduled_us.tolist() == [5_000] * 3
    assert "vidur 0.0.26 does not model: prefix caching: every prompt is computed whole" in answer.simulated.differences
    with pytest.raises(CommandError, match="its own check of a request's tokens fails"):
        run("vidur", recording("some/Preempted"))


def test_a_table_of_llmservingsim_is_matched_by_arrival(tmp_path: Path) -> None:
    table = tmp_path / "sim.csv.gz"
    rows = ["instance id,request id,model,input,output,arrival,end_time,latency,queuing_delay,TTFT,TPOT,ITL"]
    rows += ["0,2,m,64,31,2000,0,9000000,1000000,4000000,0,[]", "0,0,m,64,11,0,0,5000000,1000000,2000000,0,[]"]
    rows += ["0,1,m,40,21,1000,0,7000000,1000000,3000000,0,[]"]
    with gzip.open(table, "wt") as file:
        file.write("\n".join(rows))
    answer = run(f"llmservingsim:{table}", recording())
    assert answer.ttft_us.tolist() == [2_000, 3_000, 4_000]
    assert answer.e2e_us.tolist() == [5_000, 7_000, 9_000]
    table.write_bytes(gzip.compress("\n".join(rows).replace("m,40", "m,41").encode()))
    with pytest.raises(CommandError, match="request 1 has another prompt than was recorded"):
        run(f"llmservingsim:{table}", recording())


_HEADER = b"request id,input,arrival,TTFT,latency,queuing_delay\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "sim.csv.gz",
            lambda: gzip.compress(_HEADER + b"0,64,0,1,2,0\n" * 4_000_000, 1),
            "has more requests, the recording 3",
        ),
        (
            "sim.csv.gz",
            lambda: gzip.compress(bytes(64 << 20), 1),
            "no table of LLMServingSim .a line of more than 4,194,304 bytes",
        ),
        ("sim.csv.gz", gzip.compress(_HEADER)[:-9], "no table of LLMServingSim .Compressed file ended"),
        ("sim.csv.gz", b"\x1f\x8b" + bytes(100), "no table of LLMServingSim"),
        ("sim.csv", b"", "has 0 requests"),
        ("sim.csv", b"input,arrival\n1,2\n", "no table of LLMServingSim .'request id'"),
        ("sim.csv", _HEADER + b"0,64,soon,1,2,0\n", "no table of LLMServingSim .invalid literal"),
        ("sim.csv", _HEADER + b"0,64\n", "no table of LLMServingSim .int.. argument"),
        ("sim.csv", _HEADER + b"\xff\xfe\n", "no table of LLMServingSim .'utf-8' codec"),
        (
            "sim.csv",
            _HEADER + b"0,64,0,-9000,2,0\n1,40,1,1,2,0\n2,64,2,1,2,0\n",
            "a time that is not a number from 0 on",
        ),
        ("sim.csv", _HEADER + b"0,64,0,1,2,9" + b"9" * 4_300 + b"\n", "no table of LLMServingSim .Exceeds the limit"),
    ],
    ids=range(11),
)
def test_a_table_that_is_none_of_llmservingsim_is_one_line(
    tmp_path: Path, name: str, content: bytes | Callable[[], bytes], said: str
) -> None:
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(CommandError, match=said) as error:
        run(f"llmservingsim:{tmp_path / name}", recording())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dynamo", "ai-dynamo is not installed for .*pip install ai-dynamo==1.4.2"),
        ("dynamo:no-such-python", "no such program; give dynamo:PYTHON"),
        ("aiconfigurator-fitted", "not installed|no such variant"),
        ("llmservingsim:nowhere.csv", "no such file"),
        ("vidur:nowhere", "no such program; give vidur:PYTHON"),
        ("vidur-fitted", "vidur is not installed for .*pip install vidur==0.0.26 .*give vidur-fitted:PATH/bin/python"),
    ],
)
def test_what_cannot_be_run_is_one_line(name: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        run(name, recording())
