"""GuideLLM's results: generations, statuses, what its arguments say, load levels, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from builders import recorded_file

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.clients.guidellm import read_requests, recognises
from blis_replay.ingest.readers.files import HEAD_BYTES, RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.recording import Stage

EPOCH = 1_770_000_000


def record(i: int = 0, **changed: Any) -> dict[str, Any]:
    """Request i of 0.5 is sent at i s, has its first token 50 ms later, 11 tokens by 250 ms, its end 1 ms after."""
    start = EPOCH + float(i)
    timings = {"targeted_start": start - 1, "request_start": start, "first_token_iteration": start + 0.05}
    timings |= {"last_token_iteration": start + 0.25, "request_end": start + 0.251, "resolve_end": start + 0.252}
    arguments = {"model": "org/m-7b", "stream": True, "max_tokens": 11, "stop": None, "ignore_eos": True}
    made = {
        "request_id": f"r{i}",
        "response_id": f"cmpl-{i}",
        "request_args": repr({"method": None, "body": {**arguments, "prompt": "'max_tokens': 9, 'ignore_eos': False"}}),
        "info": {"status": "completed", "timings": timings, "error": None},
        "prompt_tokens": 100,
        "output_tokens": 11,
    }
    return {**made, **changed}


def old_record(i: int = 0, **changed: Any) -> dict[str, Any]:
    """The same request in a record of 0.3."""
    start = EPOCH + float(i)
    times = {"start_time": start, "first_token_time": start + 0.05, "last_token_time": start + 0.25}
    made = {"request_id": f"r{i}", "prompt_tokens": 100, "output_tokens": 11, "end_time": start + 0.251, **times}
    return {**made, **changed}


def distribution(mean: float, count: int = 2) -> dict[str, Any]:
    return {
        "mean": mean,
        "median": mean,
        "count": count,
        "total_sum": mean * count,
        "percentiles": {"p001": 1, "p99": 9},
    }


def benchmark(*successful: Any, rate: float | None = 4.0, **groups: Any) -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": len(successful)},
        "request_latency": {"successful": distribution(0.251)},
        "inter_token_latency_ms": {"successful": distribution(20.0)},
        "time_per_output_token_ms": {"successful": distribution(22.7)},
    }
    return {
        "config": {"strategy": {"type_": "constant", "rate": rate}},
        "duration": 10.0,
        "metrics": metrics,
        "requests": {"successful": list(successful), "errored": [], "incomplete": [], **groups},
    }


def results(*benchmarks: dict[str, Any]) -> dict[str, Any]:
    head = {"metadata": {"guidellm_version": "0.5.4"}, "args": {"model": None, "prefer_response_metrics": True}}
    return {**head, "benchmarks": list(benchmarks)}


def read(folder: Path, content: object) -> tuple[RequestsRead, RecordedFile]:
    file = recorded_file(folder, content)
    return read_requests(file, folder / "stamps"), file


def test_a_record_of_the_timed_generation(tmp_path: Path) -> None:
    """Arguments are read before the prompt, whatever the prompt says."""
    found, file = read(tmp_path, results(benchmark(record())))
    request = found.frame.row(0, named=True)
    assert (request["sent_us"], request["ttft_us"], request["e2e_us"]) == (EPOCH * 1_000_000, 50_000, 251_000)
    assert (request["prompt_tokens"], request["usage_output_tokens"], request["output_tokens_reported"]) == (
        100,
        11,
        11,
    )
    assert (request["max_tokens"], request["ignore_eos"]) == (11, True)
    assert (request["request_id"], request["stage"], request["status"]) == ("cmpl-0", 0, "ok")
    assert (found.model, found.version, found.clock_kind, found.events) == ("org/m-7b", "guidellm 0.5.4", "epoch", None)
    assert (file.tally.records, file.tally.rejected_count) == (1, 0)


def test_a_record_of_0_3_and_the_length_that_its_data_asks_for(tmp_path: Path) -> None:
    made = benchmark(old_record(), incomplete=[old_record(1, error="TimeoutError: timed out before completing")])
    made = {**made, "config": None, "args": {"strategy": {"rate": 6.0}}, "worker": {"backend_model": "org/m-7b"}}
    made["request_loader"] = {"data": "prompt_tokens=80,output_tokens=11,samples=200"}
    found, _file = read(tmp_path, {"benchmarks": [made]})
    assert (found.configured_output_tokens, found.ignore_eos, found.model) == (11, True, "org/m-7b")
    assert found.frame["usage_output_tokens"].to_list() == [None, None]
    assert found.frame["prompt_tokens"].to_list() == [100, None]  # the configured one, of a request that was cut off
    assert found.frame["status"].to_list() == ["ok", "aborted"]
    assert found.version == "guidellm 0.3"


@pytest.mark.parametrize("data", ["org/dataset", "output_tokens=11,output_tokens_stdev=2", None, 7])
def test_a_length_that_requests_do_not_share_is_none(tmp_path: Path, data: object) -> None:
    found, _file = read(tmp_path, {"benchmarks": [{**benchmark(old_record()), "request_loader": {"data": data}}]})
    assert (found.configured_output_tokens, found.ignore_eos) == (None, None)


def test_time_per_output_token_means_something_else_in_each_generation(tmp_path: Path) -> None:
    """0.3: (last - first) / n, from 0.4: (last - send) / n; neither is the mean gap between tokens."""
    metrics = [
        set(read(tmp_path, results(benchmark(made)))[0].aggregates["metric"]) for made in (old_record(), record())
    ]
    assert "tpot_over_n_reported" in metrics[0] - metrics[1]
    assert "tpot_with_ttft_reported" in metrics[1] - metrics[0]


def test_lists_of_requests_say_what_became_of_them(tmp_path: Path) -> None:
    cut = record(2)
    cut["info"]["timings"] |= {"request_end": None}
    made = benchmark(
        record(0),
        errored=[record(1, info={**record(1)["info"], "error": "ReadTimeout: 300 s"}), record(3, error="400")],
        incomplete=[cut],
    )
    frame = read(tmp_path, results(made))[0].frame.sort("sent_us")
    assert frame["status"].to_list() == ["ok", "timeout", "aborted", "error"]
    assert frame["ttft_us"].to_list() == [50_000, None, None, None]
    assert frame["e2e_us"].to_list() == [251_000, 251_000, 252_000, 251_000]
    assert frame["output_tokens_reported"].to_list() == [11, None, None, None]


def test_the_clients_own_count_is_not_taken_for_the_servers(tmp_path: Path) -> None:
    made = results(benchmark(record()))
    made["args"]["prefer_response_metrics"] = False
    assert read(tmp_path, made)[0].frame["usage_output_tokens"].to_list() == [None]


def test_a_benchmark_is_a_load_stage(tmp_path: Path) -> None:
    """Where no rate was asked for (synchronous, throughput) it is what was sent: 2 requests in 10 s."""
    found, _file = read(tmp_path, results(benchmark(record(0), record(1), rate=None), benchmark(record(20), rate=8.0)))
    assert found.frame["stage"].to_list() == [0, 0, 1]
    assert found.stages == (Stage(0, 0.2, 10_000_000), Stage(1, 8.0, 10_000_000))


def test_a_stage_of_so_many_requests_ends_with_the_last_send(tmp_path: Path) -> None:
    """20 requests at 4 a second are sent in 5 s, and the 10 s go on to the last answer.  100 would take 25 s."""
    few, older, many = (benchmark(record(i)) for i in (0, 20, 40))
    few["config"]["constraints"] = {"max_requests": {"max_num": 20}}
    older["args"] = {"max_number": 20}
    many["config"]["constraints"] = {"max_requests": {"max_num": 100}}
    found, _file = read(tmp_path, results(few, older, many))
    assert [stage.duration_us for stage in found.stages] == [5_000_000, 5_000_000, 10_000_000]


def test_means_over_all_benchmarks_come_from_their_sums_and_counts(tmp_path: Path) -> None:
    """(20 ms x 2 + 30 ms x 6) / 8 = 27.5 ms."""
    one, two = benchmark(record(0)), benchmark(record(20))
    two["metrics"]["inter_token_latency_ms"]["successful"] = distribution(30.0, 6)
    aggregates = read(tmp_path, results(one, two))[0].aggregates
    itl = {(stage, name): us for stage, metric, name, us in aggregates.iter_rows() if metric == "itl_reported"}
    assert itl[-1, "mean"] == 27_500 and (itl[0, "mean"], itl[1, "p50"], itl[0, "p0.1"]) == (20_000, 30_000, 1_000)
    assert (-1, "p50") not in itl
    only = read(tmp_path, results(one))[0].aggregates
    assert only.filter(only["stage"] == -1).height == only.filter(only["stage"] == 0).height


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (record(info={"timings": {"request_start": None, "queued": 1.0}}), "was never sent"),
        (record(info={"timings": {"request_start": "soon"}}), "was never sent"),
        (record(info={"timings": {"request_start": 5.0}}), "no end"),
        (record(info={"timings": {"request_start": 5.0, "request_end": 4.0}}), "ends 1000000 us before"),
        (old_record(first_token_time=1.0), "its first token comes"),
        (17, "no object"),
    ],
)
def test_a_broken_record_is_counted_with_its_place(tmp_path: Path, broken: object, reason: str) -> None:
    found, file = read(tmp_path, results(benchmark(record(0), broken, record(1))))
    assert found.frame["request_id"].to_list() == ["cmpl-0", "cmpl-1"]
    assert file.tally.rejected[0][0] == "benchmarks[0].requests.successful[1]"
    assert reason in file.tally.rejected[0][1]


def test_a_cut_file_keeps_what_came_before(tmp_path: Path) -> None:
    whole = json.dumps(results(benchmark(*(record(i) for i in range(5))))).encode()
    found, file = read(tmp_path, whole[: whole.index(b"cmpl-3")])
    assert found.frame["request_id"].to_list() == ["cmpl-0", "cmpl-1", "cmpl-2"]
    assert file.tally.rejected[0][0].startswith("benchmarks[0].requests.successful[3]")


@pytest.mark.parametrize("sort_keys", [True, False])
def test_yaml_has_what_json_has(tmp_path: Path, sort_keys: bool) -> None:
    content = results(benchmark(record(), record(1)), benchmark(record(2), rate=8.0))
    content["args"]["data_column_mapper"] = "generative_column_mapper"
    file = recorded_file(tmp_path, yaml.safe_dump(content, sort_keys=sort_keys), "benchmarks.yaml")
    assert recognises(file.head(HEAD_BYTES))
    as_yaml, (as_json, _) = read_requests(file, tmp_path / "stamps"), read(tmp_path, content)
    assert as_yaml.frame.equals(as_json.frame)
    assert as_yaml.aggregates.equals(as_json.aggregates)
    assert (as_yaml.stages, as_yaml.model, as_yaml.version) == (as_json.stages, as_json.model, as_json.version)
    assert not recognises(b"benchmarks:\n- name: pytest\n")


def of_0_8(*successful: dict[str, Any], buckets: object = None, by_server: bool = True) -> dict[str, Any]:
    """As 0.8.1 wrote a run against its own mock server: JSON as arguments of requests, no arguments at the top."""
    body = {"model": "org/m-7b", "max_tokens": 11, "ignore_eos": True, "prompt": '"max_tokens": 99'}
    for one in successful:
        one["request_args"] = json.dumps({"method": None, "stream": True, "body": body}, separators=(",", ":"))
    made = benchmark(*successful, rate=None)
    limit = {"max_requests": {"type_": "max_requests", "args": {"kind": "max_requests", "count": 4}}}
    strategy = {"type_": "constant", "rate": 4.0}
    made["config"] = {"strategy": strategy, "constraints": limit, "prefer_response_metrics": by_server}
    spec = {"data": [{"kind": "synthetic_text", "prompt_tokens": 64, "prefix_buckets": buckets}]}
    environment = {"module": "guidellm.scheduler.environments"}
    made["config"]["environment"] = environment
    return {"metadata": {"guidellm_version": "0.8.1"}, "config": {"spec": spec}, "benchmarks": [made]}


def test_a_record_of_0_8(tmp_path: Path) -> None:
    """Four requests at four a second: one second."""
    found, _ = read(tmp_path, of_0_8(*map(record, range(4))))
    request = found.frame.row(0, named=True)
    assert (request["max_tokens"], request["ignore_eos"], request["usage_output_tokens"]) == (11, True, 11)
    assert (found.model, found.version) == ("org/m-7b", "guidellm 0.8.1")
    assert [(stage.rate_per_s, stage.duration_us) for stage in found.stages] == [(4.0, 1_000_000)]
    counted, _ = read(tmp_path, of_0_8(record(), by_server=False))
    assert counted.frame["usage_output_tokens"].to_list() == [None]


@pytest.mark.parametrize("sort_keys", [True, False])
def test_yaml_of_0_8_has_what_json_has(tmp_path: Path, sort_keys: bool) -> None:
    content = of_0_8(record(), record(1), by_server=False)
    file = recorded_file(tmp_path, yaml.safe_dump(content, sort_keys=sort_keys), "benchmarks.yaml")
    assert recognises(file.head(HEAD_BYTES))
    assert read_requests(file, tmp_path / "stamps").frame.equals(read(tmp_path, content)[0].frame)


@pytest.mark.parametrize(
    ("buckets", "shared"),
    [
        ([{"bucket_weight": 100, "prefix_count": 1, "prefix_tokens": 32}], 32),
        ([{"bucket_weight": 100, "prefix_count": 4, "prefix_tokens": 32}], None),
        ([{"prefix_count": 1, "prefix_tokens": 32}, {"prefix_count": 1, "prefix_tokens": 8}], None),
        (None, None),
        ({"prefix_tokens": 32}, None),
        ([32], None),
    ],
)
def test_prompts_of_0_8_share_the_prefix_of_their_only_bucket(
    tmp_path: Path, buckets: object, shared: int | None
) -> None:
    prefix = read(tmp_path, of_0_8(record(0), record(1), buckets=buckets))[0].prefix
    assert (None if prefix is None else prefix.in_order(np.arange(2)).prompts["tokens"].to_list()) == (
        None if shared is None else [shared]
    )


def test_results_are_known_by_content() -> None:
    assert recognises(json.dumps(results(benchmark(record()))).encode())
    assert recognises(b'{"benchmarks":[{"type_":"generative_benchmark"')
    assert not recognises(b'{"benchmarks":[{"name":"pytest"')


@pytest.mark.parametrize(
    ("data", "shared"),
    [
        (["{'prefix_tokens': 1024, 'prompt_tokens': 2048, 'output_tokens': 32}"], 1024),
        (["prompt_tokens=80,prefix_tokens=0,output_tokens=35"], 0),
        (["prompt_tokens=80,output_tokens=35"], None),
        (["{'prefix_tokens': 1024, 'prefix_count': 4, 'prompt_tokens': 2048}"], None),
        (["prompt_tokens=80,prefix_tokens=16"] * 2, None),
        (["prefix_tokens: 5 are named in a dataset"], None),
        ([{"prompt_tokens": 80, "prefix_tokens": 16}], None),
    ],
)
def test_synthetic_prompts_share_the_prefix_that_was_asked_for(
    tmp_path: Path, data: list[object], shared: int | None
) -> None:
    made = results(benchmark(record(0), record(1)))
    made["args"]["data"] = data
    prefix = read(tmp_path, made)[0].prefix
    assert (None if prefix is None else prefix.in_order(np.arange(2)).prompts["tokens"].to_list()) == (
        None if shared is None else [shared]
    )


def test_the_older_generation_says_its_prefix_with_each_benchmark(tmp_path: Path) -> None:
    made = results(benchmark(record(0)), benchmark(record(1)))
    for one in made["benchmarks"]:
        one["request_loader"] = {"data": "prompt_tokens=80,prefix_tokens=32,output_tokens=35"}
    prefix = read(tmp_path, made)[0].prefix
    assert prefix is not None
    assert prefix.in_order(np.arange(2)).requests["prompt"].to_list() == [0, 0]


WHOLE = results(
    benchmark(record(0), record(1), errored=[record(2, error="x")]), benchmark(old_record(3), incomplete=[record(4)])
)


def test_benchmarks_that_are_no_list_have_no_requests(tmp_path: Path) -> None:
    found, file = read(tmp_path, b'{"benchmarks": {"a": {"metrics": {"request_totals": {"successful": 1}}}}}')
    assert (len(found.frame), found.stages, file.tally.rejected_count) == (0, (), 0)


def test_there_are_no_more_benchmarks_than_a_run_has(tmp_path: Path) -> None:
    """15 MB of them with a duration each took 600 MB."""
    many = b'{"benchmarks": [' + b'{"duration":1},' * 10_000 + b'{"duration":1}]}'
    with pytest.raises(RecordingError, match="more than 10,000 benchmarks"):
        read(tmp_path, many)
