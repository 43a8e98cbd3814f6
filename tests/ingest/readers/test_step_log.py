"""The reader of the recorder's step log: what it makes of steps, arrivals and ends, and of what is broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.step_log import StepLog, read_step_log
from blis_replay.ingest.recording import SERVER_BLOCKS
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch

ROOT = Path(__file__).parents[3]
ZERO_NS, WALL_NS = 1_000_000_000_000, 1_800_000_000_000_000_000
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks": 101}
HEADER: dict[str, Any] = {
    "blis_replay_steps": 1,
    "started": {"monotonic_ns": ZERO_NS, "wall_ns": WALL_NS},
    "vllm": "0.32.0",
    "engine": 0,
    "model": "some/model",
    "settings": {**SETTINGS, "enable_prefix_caching": True},
    "speculative_tokens": 0,
    "absent": [],
}
MS = 1_000_000

Line = list[Any]


def arrival(number: int, at_ms: float, prompt: int, most: int, parent: int | None = None, shared: int = 0) -> Line:
    """The API server had it 1 ms before the engine; both clocks are read 0.1 ms later."""
    at = round(at_ms * MS)
    name = f"cmpl-bench-ab12-{number}-0-{number:08x}"
    stamps = (at, at + MS // 10, WALL_NS + at + MS // 10, WALL_NS + at - MS)
    return ["a", number, name, *stamps, prompt, most, 0, parent, shared]


def step(
    number: int, at_ms: float, tokens: dict[int, int], *, new: dict[int, int] | None = None, lost: Iterable[int] = ()
) -> Line:
    """A call of schedule() of 0.2 ms that costs 10 us to record, with as many running as have tokens."""
    ones = [request for request, count in tokens.items() if count == 1]
    others = [[request, count] for request, count in tokens.items() if count != 1]
    admitted = [list(pair) for pair in (new or {}).items()]
    return ["s", number, round(at_ms * MS), MS // 5, 10_000, len(tokens), 0, 90, ones, others, admitted, list(lost)]


def update(number: int, at_ms: float) -> Line:
    return ["u", number, round(at_ms * MS), MS // 10, []]


def finish(
    number: int, at_ms: float, output: int, computed: int, preemptions: int = 0, how: str = "LENGTH_CAPPED"
) -> Line:
    return ["f", number, round(at_ms * MS), f"FINISHED_{how}", output, preemptions, computed]


def counters(lines: list[Line], kind: str = "c") -> Line:
    """What the writer says of the lines before."""
    count = {name: sum(line[0] == letter for line in lines) for name, letter in KINDS.items()}
    tokens = sum(len(line[8]) + sum(pair[1] for pair in line[9]) for line in lines if line[0] == "s")
    cost = sum(line[4] for line in lines if line[0] == "s")
    rest = {"scheduled_tokens": tokens, "dropped": 0, "wrapper_ns": cost, "writer_ns": 0}
    return [kind, 10**12, count | rest]


KINDS = {"steps": "s", "updates": "u", "arrivals": "a", "finished": "f"}
# Two requests, the second of which is preempted in the third step and goes on with two of its three blocks in the
# fifth; each output is processed before the next step begins.
PREEMPTED = [
    arrival(0, 10, 40, 4),
    arrival(1, 11, 36, 3, parent=0, shared=16),
    step(0, 12, {0: 40, 1: 20}, new={0: 0, 1: 16}),
    update(0, 19.9),
    step(1, 20, {0: 1, 1: 1}),
    update(1, 24.9),
    step(2, 25, {0: 1}, lost=[1]),
    update(2, 29.9),
    step(3, 30, {0: 1}),
    finish(0, 34.8, 4, 43),
    update(3, 34.9),
    step(4, 35, {1: 6}, new={1: 32}),
    finish(1, 39.8, 3, 38, preemptions=1),
    update(4, 39.9),
]


def written(folder: Path, lines: list[Line], header: dict[str, Any] = HEADER, name: str = "steps") -> Path:
    path = folder / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in [header, *lines]).encode()))
    return path


def read(*paths: Path) -> tuple[StepLog, RecordedFile]:
    files = [RecordedFile(path, path.name) for path in paths]
    log = read_step_log(files, Scratch())
    assert log is not None
    return log, files[-1]


def test_steps_with_their_prefills_and_decodes(tmp_path: Path) -> None:
    """Prefill is what a request without a token computes; the recomputation after a preemption counts as decode."""
    log, file = read(written(tmp_path, [*PREEMPTED, counters(PREEMPTED)]))
    columns = ["step_id", "ts_start_ns", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens"]
    assert log.steps.frame(columns).rows() == [
        (1, ZERO_NS + 12 * MS, 2, 60, 0, 0),
        (2, ZERO_NS + 20 * MS, 0, 0, 2, 2),
        (3, ZERO_NS + 25 * MS, 0, 0, 1, 1),
        (4, ZERO_NS + 30 * MS, 0, 0, 1, 1),
        (5, ZERO_NS + 35 * MS, 0, 0, 1, 6),
    ]
    others = ["preempted_requests", "kv_blocks_total", "kv_blocks_free", "kv_usage"]
    assert log.steps.frame(others).row(2) == (1, 100, 90, pytest.approx(0.1))
    assert (file.tally.records, file.tally.rejected_count) == (15, 0)


def test_requests_with_their_stamps(tmp_path: Path) -> None:
    """Scheduled when the step begins that admits it, a token when the update ends that brings it."""
    log, _file = read(written(tmp_path, PREEMPTED))
    columns = ["arrived_ns", "queued_ns", "scheduled_ns", "first_token_ns", "finished_ns"]
    stamps = log.journeys.lifecycles.frame(columns).select((pl.all() - ZERO_NS) / MS)
    assert stamps.row(0) == pytest.approx((9, 10, 12, 20, 34.8))
    assert stamps.row(1) == pytest.approx((10, 11, 12, 20, 39.8))
    others = ["queued_step", "scheduled_step", "first_token_step", "finished_step", "preemptions", "status"]
    rows = log.journeys.lifecycles.frame([*others, "output_tokens", "cached_prompt_tokens", "prompt_tokens"]).rows()
    assert rows == [(0, 1, 1, 4, 0, "ok", 4, 0, 40), (0, 1, 1, 5, 1, "ok", 3, 16, 36)]
    events = log.journeys.events.where("span_key = 1").frame(["event", "step_id"]).rows()
    assert events == [
        ("journey.QUEUED", 0),
        ("journey.SCHEDULED", 1),
        ("journey.FIRST_TOKEN", 1),
        ("journey.PREEMPTED", 3),
        ("journey.SCHEDULED", 5),
        ("journey.FINISHED", 5),
    ]


def test_the_tokens_of_each_request_add_up(tmp_path: Path) -> None:
    """Prompt 40 and 4 outputs: 43 computed.  After the preemption 32 found and 6 computed: 36 + 3 - 1."""
    log, _file = read(written(tmp_path, [*PREEMPTED, counters(PREEMPTED, "end")]))
    assert (log.measured["requests_conserved"], log.measured["requests_not_conserved"]) == (2, 0)
    assert (log.measured["counted_to_the_end"], log.measured["ended_in_order"]) == (1, 1)
    assert (log.measured["scheduled_tokens"], log.measured["counted_scheduled_tokens"]) == (70, 70)
    assert log.measured["wrapper_us_per_step"] == pytest.approx(10.0)


def test_a_step_that_was_dropped_shows(tmp_path: Path) -> None:
    without = [line for line in PREEMPTED if line[:2] != ["s", 3]]
    log, _file = read(written(tmp_path, [*without, counters(PREEMPTED)]))
    assert (log.measured["steps_missing"], log.measured["requests_not_conserved"]) == (1, 1)
    assert "1 engine step that the step log dropped" in log.remarks


def test_which_prompts_begin_alike(tmp_path: Path) -> None:
    log, _file = read(written(tmp_path, PREEMPTED))
    assert log.prompts is not None
    assert log.prompts.source == SERVER_BLOCKS
    assert [list(column) for column in (log.prompts.parent, log.prompts.shared_tokens, log.prompts.tokens)] == [
        *([-1, 0], [0, 16], [40, 36])
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_two_batches_in_flight(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The second step is scheduled before the output of the first is in: it counts as prefill, as vLLM counts.

    The end of a request can be written before the output that brought it, after it, or after the next step.
    """
    last = [finish(0, 19, 3, 42), update(2, 19.1), step(3, 19.2, {})]
    lines = [
        *(arrival(0, 1, 40, 3), step(0, 2, {0: 40}, new={0: 0}), step(1, 3, {0: 1}), update(0, 9)),
        *(step(2, 10, {0: 1}), update(1, 14), *(last[place] for place in order)),
    ]
    log, _file = read(written(tmp_path, lines))
    columns = ["prefill_requests", "decode_requests"]
    assert log.steps.frame(columns).rows()[:3] == [(1, 0), (1, 0), (0, 1)]
    row = log.journeys.lifecycles.frame(["first_token_step", "finished_step", "output_tokens"]).row(0)
    assert row == (1, 3, 3)
    assert log.measured["requests_conserved"] == 1


def test_a_prompt_in_chunks_yields_one_token(tmp_path: Path) -> None:
    lines = [
        *(arrival(0, 1, 100, 2), step(0, 2, {0: 64}, new={0: 0}), update(0, 9), step(1, 10, {0: 36}), update(1, 19)),
        *(step(2, 20, {0: 1}), finish(0, 24, 2, 101), update(2, 24.1)),
    ]
    log, _file = read(written(tmp_path, lines))
    assert log.steps["prefill_tokens"].to_list() == [64, 36, 0]
    assert log.snapshots.frame(["step_id", "computed_tokens", "scheduled_tokens"]).rows() == [(1, 0, 64), (2, 64, 36)]
    assert log.journeys.lifecycles["first_token_step"].to_list() == [2]


def test_speculative_decoding_says_how_many_tokens(tmp_path: Path) -> None:
    spoken = ["u", 1, 19 * MS, 0, [[0, 3]]]
    lines = [
        arrival(0, 1, 40, 9),
        step(0, 2, {0: 40}, new={0: 0}),
        ["u", 0, 9 * MS, 0, [[0, 1]]],
        step(1, 10, {0: 4}),
        spoken,
    ]
    log, _file = read(written(tmp_path, lines, {**HEADER, "speculative_tokens": 3}))
    assert log.journeys.lifecycles.frame(["output_tokens", "status"]).rows() == [(4, "unfinished")]


def test_what_is_no_line_is_rejected_by_its_number(tmp_path: Path) -> None:
    broken: list[Any] = [
        ["s", 9],
        ["x"],
        {"a": 1},
        7,
        ["f", -1, 0, "FINISHED", 1, 0, 1],
        ["a", 5],
        ["u", 1, "2", 3, []],
    ]
    log, file = read(written(tmp_path, [*PREEMPTED, *broken]))
    assert log.steps.height == 5
    assert [place for place, _reason in file.tally.rejected] == [f"line {number}" for number in range(16, 23)]


def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = written(tmp_path, PREEMPTED)
    path.write_bytes(path.read_bytes()[:-60])
    log, file = read(path)
    assert 0 < log.steps.height <= 5
    assert log.measured["counted_to_the_end"] == 0
    assert file.tally.rejected_count >= 1


def test_the_last_start_of_the_first_engine_is_used(tmp_path: Path) -> None:
    later = {**HEADER, "started": {"monotonic_ns": ZERO_NS, "wall_ns": WALL_NS + 10}}
    paths = [
        written(tmp_path, PREEMPTED, later, "b"),
        written(tmp_path, PREEMPTED[:3], HEADER, "a"),
        written(tmp_path, PREEMPTED[:3], {**HEADER, "engine": 1}, "c"),
    ]
    log, _file = read(*paths)
    assert log.steps.height == 5
    assert [remark.split(":")[0] for remark in log.remarks] == [
        "step logs of 1 further engines (data parallel)",
        "step logs of 1 earlier starts of the server",
    ]


@pytest.mark.slow
def test_a_step_log_alone_is_an_experiment(tmp_path: Path) -> None:
    """Latencies as the engine and its API server stamped them: TTFT of request 0 from 9 to 20 ms."""
    folder = tmp_path / "my-server-tp1-chat"
    folder.mkdir()
    written(folder, [*PREEMPTED, counters(PREEMPTED)])
    with read_recording(folder) as recording:
        assert (recording.model, recording.requests["ttft_us"].to_list()) == ("some/model", [11_000, 10_000])
        assert recording.requests["e2e_us"].to_list() == [25_800, 29_800]
        assert {name: recording.engine[name].value for name in SETTINGS} == SETTINGS
        assert {recording.engine[name].source for name in SETTINGS} == {"recorded"}
        assert recording.engine["max_num_seqs"].detail == "recorder"
        assert recording.prefix is not None
    outcome = ingest_source(tmp_path / "store.duckdb", folder)
    assert (outcome.requests, outcome.steps, outcome.rejected) == (2, 5, 0)


@pytest.mark.slow
def test_a_finding_says_whether_it_is_whole(tmp_path: Path) -> None:
    from blis_replay.ingest.checks.registry import run_checks

    said = {}
    for name, lines in (("whole", [*PREEMPTED, counters(PREEMPTED)]), ("cut", PREEMPTED)):
        folder = tmp_path / name
        folder.mkdir()
        written(folder, lines)
        with read_recording(folder) as recording:
            findings, _layout = run_checks(recording)
            said[name] = next(finding.message for finding in findings if finding.check == "recorder")
    assert said["whole"] == (
        "the step log is whole: 5 steps and the tokens of 2 requests add up; it cost the engine 10.0 us per step"
    )
    assert said["cut"].startswith("the step log is not whole: it breaks off behind its last counters")


@pytest.mark.slow
def test_the_counters_are_held_against_what_was_read(tmp_path: Path) -> None:
    """Lines cut out of a live log; a log cut behind counters, which agree with what is before them; steps that are lost
    behind the reader."""
    from blis_replay.ingest.checks.registry import run_checks

    live = ROOT / "fixtures" / "recorded" / "tiny-live-a"
    lines = gzip.decompress((live / "steps.jsonl.gz").read_bytes()).splitlines(keepends=True)
    middle = range(len(lines) // 2, len(lines) // 2 + 400)
    cut = {
        "middle": [line for place, line in enumerate(lines) if place not in middle or not line.startswith(b'["s"')],
        "behind": lines[: max(i for i in range(len(lines) * 7 // 10) if lines[i].startswith(b'["c"')) + 1],
        "nothing": lines,
    }
    said, others = {}, {}
    for name, kept in cut.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "bench.json.gz").write_bytes((live / "bench.json.gz").read_bytes())
        (folder / "steps.jsonl.gz").write_bytes(gzip.compress(b"".join(kept)))
        with read_recording(folder) as recording:
            findings = run_checks(recording)[0]
            said[name] = next(f.message for f in findings if f.check == "recorder")
            others[name] = [f.message for f in findings if f.check in ("clocks", "stationarity")]
            if name == "nothing":
                rows = rows_of(recording.steps.frame().filter(~pl.col("start_us").is_between(5_000_000, 9_000_000)))
                lost = replace(recording, steps=rows)
                said["later"] = next(f.message for f in run_checks(lost)[0] if f.check == "recorder")
    assert said["nothing"].startswith("the step log is whole: 4,667 steps and the tokens of 250 requests add up")
    assert "not whole: 4,479 steps of 4,667; 60,271 scheduled_tokens of 62,680; 188 steps left out" in said["middle"]
    assert "not whole: 2 requests have no end in it" in said["behind"]
    # Requests that got their first token, or ended, in the lost steps say neither when: the clocks of the whole log
    # agree within 2 ms, and so do those of what is left; nothing is called a stall or speculation.
    told = " ".join(others["middle"])
    assert "server's clock is 0.0 ms ahead of the client's, ±1.6 ms" in told
    assert "188 steps after step 2317 without a record took 1.1 s more than usual" in told
    assert not any(word in told for word in ("early", "speculative", "stood still"))
    assert "not whole: 4,473 step records of 4,667 steps in it" in said["later"]


def test_the_log_of_a_live_server_agrees_with_its_client() -> None:
    """Prompts, lengths and order are the client's; the client had each first token after the scheduler, 5 ms in the
    median."""
    live = ROOT / "fixtures" / "recorded" / "tiny-live-a"
    log, file = read(live / "steps.jsonl.gz")
    assert (file.tally.rejected_count, log.measured["requests_not_conserved"]) == (0, 0)
    bench = json.loads(gzip.decompress((live / "bench.json.gz").read_bytes()))
    mine = log.journeys.lifecycles.where("api_request_id LIKE 'cmpl-bench%'").frame()
    assert mine["prompt_tokens"].to_list() == bench["input_lens"]
    assert mine["output_tokens"].to_list() == bench["output_lens"]
    late_s = pl.Series(bench["start_times"]) + pl.Series(bench["ttfts"]) - mine["first_token_ns"] / 1e9
    assert (late_s > 0).all()
    assert late_s.median() < 0.005  # type: ignore[operator]


def test_a_pause_and_multimodal_requests_are_named(tmp_path: Path) -> None:
    """Of a server that slept for a while and one of whose requests had an image and a grammar."""
    lines: list[Line] = [["p", MS, "PAUSED_NEW"], ["p", 2 * MS, "UNPAUSED"], *PREEMPTED]
    assert read(written(tmp_path, PREEMPTED, name="plain"))[0].features == ()
    log, file = read(
        written(
            tmp_path,
            [[*line, ["multimodal", "structured_outputs"]] if line[:2] == ["a", 1] else line for line in lines],
        )
    )
    assert (log.features, log.settings["pause_state"], file.tally.rejected) == (
        ("multimodal", "structured_outputs"),
        "PAUSED_NEW",
        [],
    )
