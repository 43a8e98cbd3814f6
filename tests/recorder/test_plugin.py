"""The recorder inside of a scheduler: what it writes, and that the engine never notices it."""

from __future__ import annotations

import ast
import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import Request, Scheduler, Status

from blis_replay import recorder
from blis_replay.recorder import plugin, writer
from blis_replay.recorder.plugin import DIRECTORY, register

Line = list[Any]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder into which every fake scheduler is recorded, and the class as it was afterwards."""
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    made = Scheduler.__init__
    folder = tmp_path / "recorded"
    monkeypatch.setenv(DIRECTORY, str(folder))
    yield folder
    Scheduler.__init__ = made  # type: ignore[method-assign]


def lines_in(folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """The header and the other lines of the one file in a folder."""
    (path,) = folder.glob("steps-engine0-*.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        header, *others = map(json.loads, stream)
    return header, others


def of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line[0] == kind]


def test_without_the_variable_it_does_nothing(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY)
    before = Scheduler.__init__
    register()
    assert Scheduler.__init__ is before
    assert not recorded.exists()


def test_every_step_and_arrival_is_written(recorded: Path) -> None:
    """Two prompts of 40 tokens in a budget of 64: 40 and 24 in the first step, 16 and a decode in the second."""
    register()
    register()  # a second entry point changes nothing
    scheduler = Scheduler(max_num_batched_tokens=64)
    scheduler.add_request(Request("one", 40, 3, prompt="p"))
    scheduler.add_request(Request("two", 40, 2, prompt="p"))
    scheduler.serve()
    scheduler.shutdown()
    header, lines = lines_in(recorded)
    assert (header["vllm"], header["settings"]["max_num_batched_tokens"]) == ("0.32.0", 64)
    assert (header["settings"]["num_gpu_blocks"], header["settings"]["block_size"]) == (100, 16)
    assert header["config"]["scheduler_config"]["watermark"] == 0.0
    assert header["absent"] == ["Request.block_hashes"]  # it is a property here, which its maker does not name
    arrivals = of_kind(lines, "a")
    assert [line[1:3] for line in arrivals] == [[0, "one"], [1, "two"]]
    # Prompt tokens, max_tokens, priority; the second begins with the two full blocks of the first.
    assert [line[7:12] for line in arrivals] == [[40, 3, 0, None, 0], [40, 2, 0, 0, 32]]
    steps = of_kind(lines, "s")
    assert [line[1] for line in steps] == [0, 1, 2]
    # Requests with one token, others, admitted with their computed tokens, preempted.
    assert steps[0][8:] == [[], [[0, 40], [1, 24]], [[0, 0], [1, 0]], []]
    assert steps[1][8:] == [[0], [[1, 16]], [], []]
    assert [line[5:8] for line in steps] == [[2, 0, 94], [2, 0, 93], [2, 0, 93]]  # running, waiting, free of 99 blocks
    assert [[line[1], line[3], *line[4:]] for line in of_kind(lines, "f")] == [
        [0, "FINISHED_LENGTH_CAPPED", 3, 0, 42],
        [1, "FINISHED_LENGTH_CAPPED", 2, 0, 41],
    ]
    kind, _time, counts = lines[-1]
    assert kind == "end"
    assert {name: counts[name] for name in ("steps", "arrivals", "finished", "scheduled_tokens", "dropped")} == {
        **{"steps": 3, "arrivals": 2, "finished": 2},
        **{"scheduled_tokens": 42 + 41, "dropped": 0},
    }


def test_a_pause_and_what_an_encoder_takes_are_written(recorded: Path) -> None:
    """Before the requests: a pause for all and its end; the second request has an image and a grammar."""
    register()
    scheduler = Scheduler()
    scheduler.set_pause_state(fake_vllm.PauseState.PAUSED_ALL)
    scheduler.set_pause_state(fake_vllm.PauseState.UNPAUSED)
    scheduler.add_request(Request("one", 40, 2))
    scheduler.add_request(Request("two", 40, 2, mm_features=["an image"], use_structured_output=True))
    asks = SimpleNamespace(prompt_logprobs=1)
    scheduler.add_request(Request("three", 40, 2, sampling_params=asks, pooling_params=asks))
    scheduler.shutdown()
    _header, lines = lines_in(recorded)
    assert [line[2] for line in of_kind(lines, "p")] == ["PAUSED_ALL", "UNPAUSED"]
    assert [line[12:] for line in of_kind(lines, "a")] == [
        [],
        [["multimodal", "structured_outputs"]],
        [["prompt_logprobs", "pooling"]],
    ]


class Drafting(Scheduler):
    """Says what each step gave, as a scheduler with drafts does."""

    num_spec_tokens = 2

    def update_from_output(self, output: Any, model_output: object) -> dict[int, object]:
        super().update_from_output(output, model_output)
        gave = [SimpleNamespace(request_id=name, new_token_ids=[1]) for name in output.num_scheduled_tokens]
        return {0: SimpleNamespace(outputs=gave)}


def test_the_last_tokens_of_a_request_that_speculates_are_its_own(recorded: Path) -> None:
    """vLLM frees a request in the update that gives its last tokens; it keeps its number until that is down."""
    register()
    scheduler = Drafting()
    scheduler.add_request(Request("one", 40, 2))
    scheduler.serve()
    scheduler.shutdown()
    _header, lines = lines_in(recorded)
    assert [line[1:3] for line in of_kind(lines, "a")] == [[0, "one"]]
    assert [line[4] for line in of_kind(lines, "u")] == [[[0, 1]], [[0, 1]]]


def test_an_abort_is_an_end(recorded: Path) -> None:
    register()
    scheduler = Scheduler()
    scheduler.add_request(Request("one", 40, 9))
    scheduler.schedule()
    scheduler.finish_requests("one", Status.FINISHED_ABORTED)
    scheduler.shutdown()
    ((_kind, number, _time, status, *counts),) = of_kind(lines_in(recorded)[1], "f")
    assert (number, status, counts) == (0, "FINISHED_ABORTED", [0, 0, 40])


def test_an_error_of_its_own_ends_the_recording_alone(
    recorded: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output without any of the fields: one warning, the engine gets it, and the scheduler is as it was."""
    output = object()
    monkeypatch.setattr(Scheduler, "schedule", lambda self: output)
    register()
    scheduler = Scheduler()
    with caplog.at_level(logging.WARNING, "vllm.blis_replay"):
        assert scheduler.schedule() is output
        assert scheduler.schedule() is output
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the server goes on" in caplog.text
    assert not {"schedule", "update_from_output", "add_request"} & vars(scheduler).keys()


def test_an_error_of_the_engine_stays_its_own(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise AssertionError("of the engine")

    monkeypatch.setattr(Scheduler, "schedule", broken)
    register()
    scheduler = Scheduler()
    with pytest.raises(AssertionError, match="of the engine"):
        scheduler.schedule()
    assert "schedule" in vars(scheduler)


@pytest.mark.parametrize(
    "there",
    [
        lambda place: place.write_text("a file where a folder is wanted", "utf-8"),
        os.mkfifo,
        lambda place: place.symlink_to("/dev/full"),
        lambda place: place.symlink_to(place.parent / "nowhere"),
        lambda place: place.symlink_to(place),
    ],
    ids=["a file", "a pipe", "a device", "a link to nothing", "a link to itself"],
)
def test_a_folder_that_cannot_be_written_is_one_warning(
    recorded: Path, caplog: pytest.LogCaptureFixture, there: Callable[[Path], object]
) -> None:
    there(recorded)
    register()
    with caplog.at_level(logging.WARNING, "vllm.blis_replay"):
        scheduler = Scheduler()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    scheduler.add_request(Request("one", 4, 2))
    scheduler.serve()


def no_space(_writer: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_from_the_beginning_has_no_recording(
    recorded: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.Writer, "_flush", no_space)
    register()
    with caplog.at_level(logging.WARNING, "vllm.blis_replay"):
        scheduler = Scheduler()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(recorded.iterdir()) == []
    scheduler.add_request(Request("one", 4, 2))
    scheduler.serve()


def test_a_full_disk_is_one_warning(
    recorded: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    scheduler = Scheduler()
    monkeypatch.setattr(writer.Writer, "_flush", no_space)
    scheduler.add_request(Request("one", 4, 2))
    with caplog.at_level(logging.WARNING, "vllm.blis_replay"):
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "No space left on device" in caplog.text
    scheduler.serve()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "schedule" not in vars(scheduler)


def test_what_does_not_fit_is_dropped_and_counted(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that gets no time: two records fit, the engine goes on, and the file says how many are missing."""
    monkeypatch.setattr(writer, "MOST_WAITING", 1)
    monkeypatch.setattr(writer, "_WAKE_S", 30.0)
    register()
    scheduler = Scheduler()
    scheduler.add_request(Request("one", 4, 50))
    scheduler.serve()
    scheduler.shutdown()
    _header, lines = lines_in(recorded)
    counts = lines[-1][2]
    written = sum(counts[name] for name in ("steps", "updates", "arrivals", "finished"))
    assert written + counts["dropped"] == 50 + 50 + 1 + 1
    assert counts["dropped"] > 90


_KILLED = """
import sys, time
sys.path[:0] = {paths}
import fake_vllm
sys.modules.update(fake_vllm.modules())
from blis_replay.recorder.plugin import register
register()
scheduler = fake_vllm.Scheduler()
scheduler.add_request(fake_vllm.Request("one", 4, 1 << 30))
while True:
    output = scheduler.schedule()
    time.sleep(0.01)
    scheduler.update_from_output(output, None)
    print(scheduler.requests["one"].num_output_tokens, flush=True)
"""


@pytest.mark.heavy
def test_a_killed_server_loses_less_than_a_second(recorded: Path) -> None:
    """Steps of 10 ms or more, killed in the middle: a whole gzip file that lacks fewer than 100 of them."""
    script = _KILLED.format(paths=[str(Path(fake_vllm.__file__).parent)])
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    served = 0
    while served < 300:
        served = int(server.stdout.readline())
    server.send_signal(signal.SIGKILL)
    served = int(([served, *map(int, server.stdout.read().split())])[-1])
    server.stdout.close()
    server.wait()
    _header, lines = lines_in(recorded)
    assert served - len(of_kind(lines, "s")) < 100
    assert lines[-1][0] == "c"


def test_it_needs_nothing_but_python_3_9() -> None:
    """It is copied into the server's environment: no import but of the standard library and of itself."""
    for path in Path(recorder.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"), feature_version=(3, 9))
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots = {name.split(".")[0] for name in named} - {"vllm"}
        assert roots <= sys.stdlib_module_names | {"blis_replay"}
        assert {name for name in named if name.startswith("blis_replay")} <= {
            f"blis_replay.recorder.{other}" for other in ("writer", "plugin")
        }


def test_it_is_an_entry_point_of_the_package() -> None:
    from importlib.metadata import entry_points

    (mine,) = {entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "blis_replay"}
    assert mine.load() is plugin.register
