"""``vllm bench serve`` results: columns, the role of a chat, failures, appended runs, aggregates alone, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import recorded_file
from step_log import step_log_requests

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.clients import vllm_bench
from blis_replay.ingest.readers.clients.vllm_bench import read_requests, recognises
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.recording import REBUILT, REBUILT_E2E, Stage


def result(requests: int = 2, **changed: Any) -> dict[str, Any]:
    """Request i is sent at 1000 + i s, its three tokens come 50, 70 and 100 ms later."""
    made = {
        "date": "20260101-000000",
        "backend": "openai",
        "model_id": "org/m-7b",
        "tokenizer_id": "org/m-7b",
        "num_prompts": requests,
        "request_rate": 4.0,
        "duration": 10.0,
        "completed": requests,
        "failed": 0,
        "total_input_tokens": 100 * requests,
        "total_output_tokens": 3 * requests,
        "request_throughput": 0.2,
        "input_lens": [100] * requests,
        "output_lens": [3] * requests,
        "ttfts": [0.05] * requests,
        "itls": [[0.02, 0.03]] * requests,
        "start_times": [1000.0 + i for i in range(requests)],
        "generated_texts": ["secret"] * requests,
        "errors": [""] * requests,
        "mean_itl_ms": 25.0,
        "median_itl_ms": 25.0,
        "p99_itl_ms": 29.9,
        "std_itl_ms": 5.0,
        "mean_e2el_ms": 100.0,
    }
    return {**made, **changed}


def read(folder: Path, content: object) -> tuple[RequestsRead, RecordedFile]:
    file = recorded_file(folder, content)
    return read_requests(file, folder / "stamps"), file


def stamps_of(found: RequestsRead, i: int) -> list[int]:
    assert found.events is not None
    first = found.events.offsets[i]
    return np.fromfile(found.events.path, np.int64)[first : first + found.events.counts[i]].tolist()


def test_columns_become_requests(tmp_path: Path) -> None:
    found, file = read(tmp_path, result())
    request = found.frame.row(1, named=True)
    assert (request["sent_us"], request["ttft_us"], request["e2e_us"]) == (1_001_000_000, 50_000, 100_000)
    assert (request["prompt_tokens"], request["usage_output_tokens"], request["status"]) == (100, 3, "ok")
    assert stamps_of(found, 1) == [1_001_050_000, 1_001_070_000, 1_001_100_000]
    assert (found.model, found.clock_kind, found.stages) == ("org/m-7b", "monotonic", (Stage(0, 4.0, 500_000),))
    assert (file.tally.records, file.tally.rejected_count, found.lacks) == (2, 0, ())


def test_aggregates_are_in_milliseconds(tmp_path: Path) -> None:
    aggregates = read(tmp_path, result(p50_itl_ms=25.0))[0].aggregates  # --metric-percentiles 50,99 says it twice
    said = {(stage, metric, name): value for stage, metric, name, value in aggregates.iter_rows()}
    assert len(said) == aggregates.height
    assert said[-1, "itl_reported", "mean"] == said[0, "itl_reported", "p50"] == 25_000
    assert (said[-1, "itl_reported", "p99"], said[-1, "e2e", "mean"]) == (29_900, 100_000)
    assert (said[-1, "output_tokens_reported", "mean"], said[-1, "requests", "sent"]) == (3, 2)
    assert "std" not in set(aggregates["statistic"])


def test_a_failed_request_has_length_0_and_perhaps_some_tokens(tmp_path: Path) -> None:
    """One was cut off after two tokens, one refused: how long the client held on is known of the first only."""
    made = result(3, errors=["", "Traceback:\n x\nTimeoutError: read", "Internal Server Error"])
    made |= {"output_lens": [3, 0, 0], "ttfts": [0.05, 0.05, 0.0], "itls": [[0.02, 0.03], [0.02], []]}
    found, _file = read(tmp_path, made)
    assert found.frame["status"].to_list() == ["ok", "timeout", "error"]
    assert found.frame["ttft_us"].to_list() == [50_000, None, None]
    assert found.frame["e2e_us"].to_list() == [100_000, 70_000, None]
    assert found.frame["output_tokens_reported"].to_list() == [3, None, None]
    assert (stamps_of(found, 1), stamps_of(found, 2)) == ([1_001_050_000, 1_001_070_000], [])


def test_a_length_below_the_count_of_events_is_the_clients_own(tmp_path: Path) -> None:
    """A chat's first event has the role, so one more event than tokens is none too many."""
    frame = read(tmp_path, result(output_lens=[1, 1]))[0].frame
    assert (frame["usage_output_tokens"].to_list(), frame["output_tokens_reported"].to_list()) == ([None] * 2, [1] * 2)
    assert read(tmp_path, result(output_lens=[2, 2]))[0].frame["usage_output_tokens"].to_list() == [2, 2]


def test_appended_runs_are_load_stages(tmp_path: Path) -> None:
    """A rate without bound is written as a text; what was achieved stands in its place.

    Two requests at 4 a second are sent in 0.5 s; the 10 s go on until the last answer.
    """
    second = result(1, start_times=[2000.0], request_rate="inf", request_throughput=7.5)
    found, _file = read(tmp_path, json.dumps(result()).encode() + b"\n" + json.dumps(second).encode())
    assert found.frame["stage"].to_list() == [0, 0, 1]
    assert found.stages == (Stage(0, 4.0, 500_000), Stage(1, 7.5, 10_000_000))
    assert set(found.aggregates["stage"]) == {0, 1}


def test_without_detail_there_are_aggregates_and_a_word_about_it(tmp_path: Path) -> None:
    columns = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
    found, _file = read(tmp_path, {key: value for key, value in result().items() if key not in columns})
    assert (len(found.frame), found.events) == (0, None)
    assert "without --save-detailed" in found.lacks[0]
    assert found.aggregates.filter(found.aggregates["metric"] == "itl_reported").height > 0


@pytest.mark.parametrize(
    ("load", "stage", "clients"),
    [
        # One client: 0.287 a second of 3.48 s each, and the next is sent when the one before is answered.
        ({"duration": 347.83, "request_throughput": 0.2875, "max_concurrency": 1}, Stage(0, 0.2875, 347_830_000), [1]),
        # The same from TTFT and TPOT alone, as is written by default: 45 ms + 247 x 13.9 ms.
        (
            {"duration": 347.83, "request_throughput": 0.2875, "max_concurrency": 1, "mean_e2el_ms": None},
            *(Stage(0, 0.2875, 347_830_000), [1]),
        ),
        # The rate was achieved.
        ({"duration": 13.0, "request_throughput": 9.5, "max_concurrency": 64}, Stage(0, 10.0, 10_000_000), []),
        # A short run ends 3.48 s after its last send: 26 were in flight on average, which 200 do not bound.
        ({"duration": 13.5, "request_throughput": 7.4, "max_concurrency": 200}, Stage(0, 10.0, 10_000_000), []),
        ({"duration": 347.83, "request_throughput": 0.2875, "max_concurrency": None}, Stage(0, 10.0, 10_000_000), []),
    ],
)
def test_a_rate_that_max_concurrency_held_back_is_a_closed_loop(
    tmp_path: Path, load: dict[str, Any], stage: Stage, clients: list[float]
) -> None:
    means = {"mean_e2el_ms": 3478.3, "mean_ttft_ms": 45.0, "mean_tpot_ms": 13.9, "total_output_tokens": 24_800}
    found, _file = read(tmp_path, result(100, request_rate=10.0) | means | load)
    assert found.stages == (stage,)
    asked = found.aggregates.filter(found.aggregates["metric"] == "concurrency")["value"].unique().to_list()
    assert asked == clients


def test_without_start_times_every_request_is_rejected_and_says_why(tmp_path: Path) -> None:
    made = result()
    del made["start_times"]
    found, file = read(tmp_path, made)
    assert (len(found.frame), file.tally.rejected_count) == (0, 2)
    assert "since January 2026" in file.tally.rejected[0][1]


def of_two_clients(**changed: Any) -> dict[str, Any]:
    """Four requests of 0.1, 0.3, 0.1 and 0.1 s without send times, two in flight.

    The third goes when the first is done, at 0.1 s, the fourth when the third is, at 0.2 s; all is done at 0.3 s.
    """
    made = result(4, request_rate="inf", max_concurrency=2, duration=0.3, request_throughput=13.3, **changed)
    made["itls"] = [[0.02, 0.03], [0.15, 0.1], [0.02, 0.03], [0.02, 0.03]]
    del made["start_times"]
    return made


def test_send_times_follow_from_requests_in_flight(tmp_path: Path) -> None:
    """Older releases of the tool do not write them; `--max-concurrency` makes requests wait for one another."""
    found, file = read(tmp_path, of_two_clients())
    sent = found.frame["sent_us"]
    assert (sent - sent[0]).to_list() == [0, 0, 100_000, 200_000]
    assert (found.placed, file.tally.rejected_count) == (REBUILT, 0)
    assert stamps_of(found, 3)[0] - sent[0] == 250_000


def test_without_gaps_the_e2e_of_a_request_follows_from_the_mean_tpot(tmp_path: Path) -> None:
    """TTFT 50 ms and a mean TPOT of 25 ms: three tokens take 100 ms, 11 take 300 ms."""
    made = of_two_clients(output_lens=[3, 11, 3, 3], mean_tpot_ms=25.0)
    del made["itls"]
    found, _file = read(tmp_path, made)
    assert found.frame["e2e_us"].to_list() == [100_000, 300_000, 100_000, 100_000]
    assert (found.frame["sent_us"] - found.frame["sent_us"][0]).to_list() == [0, 0, 100_000, 200_000]
    assert (found.placed, found.events) == (REBUILT_E2E, None)


def test_a_request_is_sent_at_the_microsecond_in_which_another_one_ends(tmp_path: Path) -> None:
    """Rounded apart, an end 1 us after the send that it caused would make three in flight of two."""
    ttfts = [0.1 + i * 0.0037 / 3 for i in range(40)]
    made = result(40, request_rate="inf", max_concurrency=2, duration=2.5, ttfts=ttfts, output_lens=[2] * 40)
    made |= {"mean_tpot_ms": 1.2345678}
    del made["itls"], made["start_times"]
    found, _file = read(tmp_path, made)
    ended_us = (found.frame["sent_us"] + found.frame["e2e_us"]).to_list()
    assert set(found.frame["sent_us"].to_list()[2:]) <= set(ended_us)


@pytest.mark.parametrize(
    "changed",
    [{"duration": 0.4}, {"duration": -1}, {"max_concurrency": None}, {"max_concurrency": -1}, {"request_rate": 4.0}],
)
def test_send_times_that_nothing_tells_are_not_rebuilt(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A run a third longer than its requests had other requests in flight; without a cap their rate is random."""
    found, file = read(tmp_path, of_two_clients() | changed)
    assert (len(found.frame), file.tally.rejected_count, found.placed) == (0, 4, "")


def test_rebuilt_runs_do_not_stand_beside_recorded_ones(tmp_path: Path) -> None:
    """They have no clock in common."""
    both = json.dumps(result()).encode() + b"\n" + json.dumps(of_two_clients()).encode()
    found, file = read(tmp_path, both)
    assert (len(found.frame), file.tally.rejected_count, found.placed) == (2, 4, "")


def test_rebuilt_runs_of_a_sweep_follow_one_another(tmp_path: Path) -> None:
    found, _file = read(tmp_path, json.dumps(of_two_clients()).encode() + b"\n" + json.dumps(of_two_clients()).encode())
    sent = found.frame["sent_us"]
    assert (sent - sent[0]).to_list() == [0, 0, 100_000, 200_000, 300_000, 300_000, 400_000, 500_000]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("itls", [0.01, -0.01], "itls"),
        ("itls", [0.01, "x"], "itls"),
        ("itls", 0.01, "itls"),
        ("itls", [1e308, 1e308], "itls"),
        ("ttfts", None, "ttft"),
        ("ttfts", -1, "ttft"),
        ("start_times", "soon", "no start time"),
    ],
)
def test_a_broken_value_costs_its_request_only(tmp_path: Path, column: str, value: object, reason: str) -> None:
    made = result(3)
    made[column] = [*made[column][:1], value, *made[column][2:]]
    found, file = read(tmp_path, made)
    assert found.frame["sent_us"].to_list() == [1_000_000_000, 1_002_000_000]
    assert [stamps_of(found, i)[0] for i in range(2)] == [1_000_050_000, 1_002_050_000]
    assert file.tally.rejected[0][0] == "request 1" and reason in file.tally.rejected[0][1]


def test_a_file_cut_off_after_its_times_still_tells_which_failed(tmp_path: Path) -> None:
    whole = json.dumps(result(3, output_lens=[3, 0, 3])).encode()
    found, file = read(tmp_path, whole[: whole.index(b'"secret"')])
    assert found.frame["status"].to_list() == ["ok", "error", "ok"]
    assert file.tally.rejected_count == 1


def test_times_of_a_real_server_are_those_of_its_own_log(data_pack: Path, tmp_path: Path) -> None:
    """vLLM 0.32.0 with the plugin that logs every step: 300 and 70 requests, after 3 warm-up ones.

    Lengths are equal to the token.  The client stamps a send before it opens the connection, and an
    event once its loop comes to it: 1 to 10 ms after the scheduler had the token.
    """
    for name, requests in (("A", 300), ("C", 70)):
        folder = data_pack / "live-vllm-0.32" / name
        path = folder / "bench.json.gz"
        frame = read_requests(RecordedFile(path, path.name), tmp_path / name).frame.sort("sent_us")
        truth = step_log_requests(folder / "steplog.jsonl.gz")[-requests:]
        assert frame["prompt_tokens"].to_list() == [request.prompt_tokens for request in truth]
        assert frame["usage_output_tokens"].to_list() == [len(request.token_us) for request in truth]
        sent_us, ttft_us, e2e_us = (frame[column].to_numpy() for column in ("sent_us", "ttft_us", "e2e_us"))
        assert (sent_us < [request.arrived_us for request in truth]).all()
        for client_us, token in ((sent_us + ttft_us, 0), (sent_us + e2e_us, -1)):
            late_us = client_us - [request.token_us[token] for request in truth]
            assert late_us.min() > 0 and late_us.max() < 10_000


def test_what_the_client_held_back_and_probes_are_named(tmp_path: Path) -> None:
    found, _file = read(tmp_path, result(3, queue_times=[0.0, 0.2, 1.5], probe_completed=7, probe_failed=1))
    assert found.remarks[0].startswith("8 probe requests (--probe-request-rate)")
    assert "held 2 requests back" in found.remarks[1] and "up to 1.5 s" in found.remarks[1]
    assert read(tmp_path, result(3, queue_times=[0.0, 1e-4, 2e-4]))[0].remarks == ()


def test_a_pooling_run_has_no_tokens_and_says_so(tmp_path: Path) -> None:
    """The result of `--backend openai-embeddings` has neither ttfts nor start times."""
    made = {key: value for key, value in result().items() if key not in ("ttfts", "itls", "start_times", "output_lens")}
    found, file = read(tmp_path, made | {"total_input_sequences": 2, "latencies": [0.1, 0.1]})
    assert len(found.frame) == 0
    assert file.tally.rejected[0] == ("request 0", "a pooling request, which has no output tokens")


def test_a_data_set_that_makes_fewer_prompts_than_asked_for_lost_nothing(tmp_path: Path) -> None:
    """``prefix_repetition`` asked for 250 made 246: the file says 246 completed and none failed."""

    def sent(run: dict[str, Any]) -> float:
        aggregates = read(tmp_path, run)[0].aggregates
        return {row[:3]: row[3] for row in aggregates.iter_rows()}[-1, "requests", "sent"]

    made = result(2, num_prompts=6)
    assert (sent(made), read(tmp_path, made)[0].stages) == (2, (Stage(0, 4.0, 500_000),))
    assert sent(result(2, num_prompts=6, completed=6)) == 6, "two records of six: the others are missing"


def test_what_sglangs_server_says_of_itself_is_read(tmp_path: Path) -> None:
    """Of the first result, and nothing is counted twice of a file that is cut off."""
    said = {"server_info": {"model_path": "org/m-7b", "tp_size": 2}, "request_rate": float("inf")}
    file = recorded_file(tmp_path, json.dumps(said) + '\n{"server_info": {"tp_size": 4}')
    facts = vllm_bench.sglang_server(file)
    assert (facts.model, facts.tensor_parallelism, facts.engine) == ("org/m-7b", 2, {})
    assert file.tally.rejected_count == 0


@pytest.mark.parametrize(("ratio", "spread"), [(1.0, 0.0), (0.5, 1 / 3), (0.0, 1.0)])
def test_how_loads_were_drawn_is_read(tmp_path: Path, ratio: float, spread: float) -> None:
    """SGLang draws lengths from ratio x N to N: 1/2 N to N is 3/4 N, a third of which on either side is 1/4 N."""
    made = result(burstiness=0.5, dataset_name="random", random_range_ratio=ratio)
    said = {(metric, name): value for _stage, metric, name, value in read(tmp_path, made)[0].aggregates.iter_rows()}
    assert said["burstiness", "asked"] == 0.5
    assert said["lengths", "spread"] == pytest.approx(spread)


def test_a_request_that_was_never_sent_does_not_make_the_zero(tmp_path: Path) -> None:
    found, file = read(tmp_path, result(2, start_times=[0.0, 1001.0]))
    assert found.frame["sent_us"].to_list() == [1_001_000_000]
    assert file.tally.rejected_count == 1


def test_results_are_known_by_content() -> None:
    assert recognises(json.dumps(result()).encode())
    assert not recognises(b'[{"benchmark": {}, "metric": {}}]')


def test_there_are_no_more_runs_and_requests_than_a_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 MB of empty objects took 6 GB."""
    with pytest.raises(RecordingError, match="document 10001, duration: more than 10,000 runs"):
        read(tmp_path, b"{}" * 10_000 + b'{"duration": 1}')
    monkeypatch.setattr(vllm_bench, "MAX_REQUESTS", 2)
    with pytest.raises(RecordingError, match="or 2 requests; split the file"):
        read(tmp_path, result(3))


def test_what_is_no_number_and_no_text_is_not_kept(tmp_path: Path) -> None:
    _found, file = read(tmp_path, result(1, ttfts=[[0.05] * 9], duration=[1]))
    assert file.tally.rejected == [("request 0", "a ttft that is not a usable time")]
