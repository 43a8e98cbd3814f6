"""What costs another simulator most: a simulator behind the contract of a command, with one thing wrong in it.

It is the engine here, in a program of its own.  It reads the folder that any command gets, and runs with another
input than it was told, so the truth is known.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.command import command_simulator
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.explain import trial
from blis_replay_labs.board.cost import STEP_TIME, cost_of
from blis_replay_labs.board.leaderboard import Cost
from blis_replay_labs.planted.faults import Case, Fault, planted_case

pytestmark = pytest.mark.slow

FOREIGN = """
import csv, json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from blis_replay.blis.engine import simulate
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace
from blis_replay.replay.release_file import load_release
folder = Path(sys.argv[-1])
rows = list(csv.DictReader((folder / "requests.csv").open()))
column = lambda name: np.array([int(row[name]) for row in rows])
told = json.loads((folder / "engine.json").read_text())
names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_gpu_blocks", "async_scheduling")
engine = EngineConfig(**{name: told["arguments"][name] for name in names})
blocks = [[int(key) for key in row["prefix_blocks"].split()] for row in rows]
count = np.array([len(keys) for keys in blocks])
keys = BlockKeys(np.cumsum(count) - count, count, np.array([k for b in blocks for k in b], np.int32), engine.block_size)
prompt, output, prefill = column("prompt_tokens"), column("output_tokens"), column("prefill_tokens")
entry = load_release(str(folder / "coefficients.yaml")).models[0]
latency, lifecycle = entry.latency, entry.lifecycle
WRONG
trace = RequestTrace(column("arrival_us"), prompt, prefill, output, np.full(len(rows), NEVER_US), block_keys=keys)
result = simulate(trace, engine, latency, lifecycle)
with (folder / "results.csv").open("w") as file:
    file.write("request_index,ttft_us,e2e_us,scheduled_us\\n")
    for i in range(len(rows)):
        scheduled_us = result.scheduled_us[i] - result.arrival_us[i]
        file.write(f"{i},{result.ttft_us[i]},{result.e2e_us[i]},{scheduled_us}\\n")
(folder / "simulator.json").write_text(json.dumps({"name": "foreign", "version": "1", "not_modelled": []}))
"""


def cost(tmp_path: Path, wrong: str, case: Case, lacks: str = "[]") -> Cost:
    program = tmp_path / "foreign.py"
    program.write_text(FOREIGN.replace("WRONG", wrong).replace('"not_modelled": []', f'"not_modelled": {lacks}'))
    simulator = command_simulator(f"cmd:{sys.executable} {program}", case.release, 120.0)
    return cost_of(replay(case.recording, case.release, simulator=simulator), case.release)


def planted(load: str = "two levels") -> Case:
    """A server of which nothing is told wrong, recorded by its client alone."""
    return planted_case(Fault("none", (), "client", load))


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit to fewer requests is quicker."""
    monkeypatch.setattr(trial, "MAX_REQUESTS", 250)


@pytest.mark.parametrize(
    ("wrong", "load", "says", "blamed"),
    [
        ("engine = replace(engine, num_gpu_blocks=420)", "long prompts", "[]", "KV blocks"),
        ("engine = replace(engine, async_scheduling=not engine.async_scheduling)", "bursts", "[]", "scheduling mode"),
        ("engine = replace(engine, enable_prefix_caching=False)", "long prompts", "[]", "prefix cache"),
        ("latency = replace(latency, intercept_ns=latency.intercept_ns * 13 // 10)", "two levels", "[]", STEP_TIME),
        ("", "two levels", "[]", None),
        # It has the prefix cache, whatever its header says, and its answers show it.
        ("", "long prompts", '["prefix caching"]', None),
    ],
)
def test_what_is_wrong_in_a_foreign_simulator_is_found(
    tmp_path: Path, wrong: str, load: str, says: str, blamed: str | None
) -> None:
    found = cost(tmp_path, wrong, planted(load), says)
    assert (found.imitated, found.largest) == (True, blamed), (found.shares, found.evidence)


def test_what_a_simulator_says_that_it_lacks_is_a_component_of_its_own(tmp_path: Path) -> None:
    """Two are wrong, and one is said: steps of 1.3 times the length, and prompts that are computed whole."""
    wrong = "engine = replace(engine, enable_prefix_caching=False)\n"
    wrong += "latency = replace(latency, intercept_ns=latency.intercept_ns * 13 // 10)"
    said = '["prefix caching: every prompt is computed whole"]'
    found = cost(tmp_path, wrong, planted("long prompts"), said)
    assert found.imitated
    assert found.evidence["prefix cache"] == "it says that it does not model this"
    assert found.largest == STEP_TIME
    # Few prompts here share a prefix: without the cache alone this load takes 1 % longer.
    assert 0.005 < found.shares["prefix cache"][0] < 0.03 < found.shares[STEP_TIME][0]


def test_other_lengths_in_a_foreign_simulator_are_found(tmp_path: Path) -> None:
    """It decodes what re-tokenising counts, which the recording has too: four fifths of what the server decoded."""
    case = planted()
    requests = case.recording.requests.frame()
    shorter = [max(round(n * (0.6 + 0.05 * (i % 9))), 1) for i, n in enumerate(requests["output_tokens"])]
    case = replace(case, recording=_with_reported(case, shorter))
    found = cost(tmp_path, f"output = np.array({shorter})", case)
    assert found.largest == "output lengths", (found.shares, found.evidence)


def _with_reported(case: Case, lengths: list[int]) -> Recording:
    frame = case.recording.requests.frame().with_columns(output_tokens_reported=pl.Series(lengths, dtype=pl.Int64))
    return replace(case.recording, requests=rows_of(frame))


def test_a_simulator_with_the_kernels_of_a_new_server_is_imitated() -> None:
    """The engine here beside itself, with Mixtral's experts: stalls of 0.9 s that no step time has."""
    release = load_release(DEFAULT_RELEASE)
    found = cost_of(replay(bundled_recording(bundled_aliases()["mixtral-roleplay"]), release), release)
    assert (found.imitated, found.largest) == (True, None), (found.shares, found.evidence)
    assert found.left < 0.001
