"""``blis-replay simulate`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from command_line import Run
from worked_example import ENGINE, RELEASE

from blis_replay_labs.synthetic import simulate

ARGUMENTS = ("--requests", "load.csv", "--engine", "engine.yaml", "--coefficients", "worked.yaml", "--out", "run")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The files of ARGUMENTS: two requests of 100 prompt tokens and 3 output tokens, 1 s apart."""
    (tmp_path / "worked.yaml").write_text(RELEASE, "utf-8")
    (tmp_path / "engine.yaml").write_text(ENGINE, "utf-8")
    (tmp_path / "load.csv").write_text("arrival_s,prompt_tokens,output_tokens,user\n0,100,3,a\n1,100,3,b\n", "utf-8")
    return tmp_path


def body(document: dict[str, object]) -> dict[str, object]:
    """An answer without the names of its form and of the program's version."""
    return {name: value for name, value in document.items() if name not in ("schema", "version")}


def test_tables_and_summary(run: Run, inputs: Path) -> None:
    """Worked example V1, twice: TTFT 2.22 ms, E2E 4.27 ms, ITL 1.025 ms."""
    answer = run("simulate", *ARGUMENTS)
    assert (answer.code, answer.err) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in answer.out.splitlines() if line}
    assert lines["TTFT"] == ["2.22"] * 4
    assert lines["E2E"] == ["4.27"] * 4
    assert lines["ITL"] == ["1.02"] * 4
    assert "2 of 2 requests completed in 1.0 s and 6 steps" in answer.out
    assert "columns not used: user" in answer.out
    assert "cut short" not in answer.out
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    written = ["requests.parquet", "steps.parquet", "summary.json"]
    assert sorted(path.name for path in (inputs / "run").iterdir()) == written
    requests = pl.read_parquet(inputs / "run" / "requests.parquet")
    assert requests["e2e_us"].to_list() == [4270, 4270]
    assert requests.select("queued_us", "first_token_us", "finished_us", "ttft_us").row(0) == (200, 2200, 4210, 2220)
    steps = pl.read_parquet(inputs / "run" / "steps.parquet")
    told = steps.select("start_us", "end_us", "prefill_tokens", "decode_tokens").rows()
    assert (len(told), told[:3]) == (6, [(200, 2200, 100, 0), (2200, 3205, 0, 1), (3205, 4210, 0, 1)])


def test_json_is_what_the_summary_file_holds(run: Run, inputs: Path) -> None:
    """Two requests of 3 tokens in 1.00427 s; ITL (4270 - 2220) / 2 = 1025 us."""
    answer = run("simulate", *ARGUMENTS, "--json")
    assert answer.json["duration_s"] == pytest.approx(1.00427)
    assert answer.json["requests_per_s"] == pytest.approx(2 / 1.00427)
    assert answer.json["output_tokens_per_s"] == pytest.approx(6 / 1.00427)
    assert answer.json["latencies_ms"]["itl"] == {"mean": 1.025, "p50": 1.025, "p90": 1.025, "p99": 1.025}
    assert [answer.json[name] for name in ("peak_running", "peak_waiting", "min_free_blocks")] == [1, 0, None]
    assert body(answer.json) == json.loads((inputs / "run" / "summary.json").read_text("utf-8"))
    assert answer.json["latencies_ms"]["tpot"]["p99"] == 1.025
    assert answer.json["provenance"]["coefficients"] == "worked"
    assert answer.json["provenance"]["engine"]["max_num_seqs"] == 8


@pytest.mark.parametrize("instances", [1, 2])
def test_outputs_that_end_at_the_longest_length_are_told(run: Run, inputs: Path, instances: int) -> None:
    """102 tokens leave each 2 of 3 output tokens: E2E 2.22 + 1.025 ms, 4 tokens in 1.003245 s."""
    (inputs / "engine.yaml").write_text(ENGINE.replace("4096", "102"), "utf-8")
    said = "2 outputs cut short at max_model_len, so less is served than was asked for"
    given = (*ARGUMENTS, "--instances", instances)
    assert said in " ".join(run("simulate", *given).out.split())
    document = run("simulate", *given, "--force", "--json").json
    assert (document["completed"], document["cut_short"]) == (2, 2)
    assert document["output_tokens_per_s"] == pytest.approx(4 / 1.003245)
    assert json.loads((inputs / "run" / "summary.json").read_text("utf-8"))["cut_short"] == 2


@pytest.mark.parametrize(
    ("file", "content", "code", "message"),
    [
        ("load.csv", "arrival_s,prompt_tokens,output_tokens\n0,x,3\n", 4, "load.csv, line 2: prompt_tokens is 'x'"),
        ("engine.yaml", ENGINE + "max_seqs: 3\n", 4, "max_seqs"),
        ("worked.yaml", "name: [", 4, "worked.yaml, line 2: not YAML"),
        ("run", "a file", 2, "run"),
    ],
)
def test_what_is_wrong_is_named(run: Run, inputs: Path, file: str, content: str, code: int, message: str) -> None:
    (inputs / file).write_text(content, "utf-8")
    answer = run("simulate", *ARGUMENTS)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert code == 2 or answer.err.count("\n") == 1


def test_memory_that_is_not_bounded_is_called_unlimited(run: Run, inputs: Path) -> None:
    assert "KV blocks unlimited" in run("simulate", *ARGUMENTS).out
    again = run("simulate", *ARGUMENTS)
    assert (again.code, again.out) == (2, "")
    assert " and summary.json are there already; " in again.err


CLUSTER = (*ARGUMENTS, "--instances", 2)
# 64 of 100 prompt tokens are alike.
SHARED = "".join(f"{5 * i},100,3,1 2 3 4\n" for i in range(40))


def test_two_instances_behind_round_robin(run: Run, inputs: Path) -> None:
    """Each of the two requests of worked example V1 on an instance of its own: the same latencies."""
    answer = run("simulate", *CLUSTER)
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["all", "2", "2.22", "2.22", "4.27", "4.27", "0", "0.0", "%"] in rows
    assert ["1", "1", "2.22", "2.22", "4.27", "4.27", "0", "0.0", "%"] in rows
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    requests = pl.read_parquet(inputs / "run" / "requests.parquet")
    assert requests.select("instance", "request_id", "e2e_us").rows() == [(0, "0", 4270), (1, "1", 4270)]
    steps = pl.read_parquet(inputs / "run" / "steps.parquet")
    assert steps["instance"].to_list() == [0, 0, 0, 1, 1, 1]


def test_the_pooled_summary_is_that_of_all_requests(run: Run, inputs: Path) -> None:
    """Sums of the instances; latencies those of the requests in the table."""
    (inputs / "load.csv").write_text(f"arrival_ms,prompt_tokens,output_tokens,block_keys\n{SHARED}", "utf-8")
    router = "weighted:prefix-affinity=3,queue-depth=2"
    answer = run("simulate", *ARGUMENTS, "--instances", 3, "--router", router, "--json")
    assert (answer.code, answer.err) == (0, "")
    document = answer.json
    assert body(document) == json.loads((inputs / "run" / "summary.json").read_text("utf-8"))
    assert document["requests"] == sum(one["requests"] for one in document["instances"]) == 40
    requests = pl.read_parquet(inputs / "run" / "requests.parquet")
    ttft_us, e2e_us = requests["ttft_us"].to_numpy(), requests["e2e_us"].to_numpy()
    assert document["latencies_ms"]["ttft"]["mean"] == pytest.approx(ttft_us.mean() / 1000)
    # Two gaps a request.
    assert document["latencies_ms"]["itl"]["mean"] == pytest.approx((e2e_us - ttft_us).sum() / 80 / 1000)
    hits = requests["cached_tokens"].sum() / requests["prompt_tokens"].sum()
    assert document["prefix_hit_rate"] == pytest.approx(hits)
    assert hits > 0.5  # 64 of 100 tokens, but for the first on each instance


def test_numbers_of_all_and_of_each_as_csv(run: Run, inputs: Path) -> None:
    lines = run("simulate", *CLUSTER, "--csv").out.splitlines()
    assert lines[0] == "instance,quantity,value"
    assert {"all,completed,2.0", "0,completed,1.0", "1,e2e_p99_ms,4.27"} <= set(lines)


def test_an_instance_without_a_request_has_nothing_to_show(run: Run, inputs: Path) -> None:
    answer = run("simulate", *ARGUMENTS, "--instances", 3, "--json")
    idle = answer.json["instances"][2]
    assert (idle["requests"], idle["prefix_hit_rate"], idle["latencies_ms"]["ttft"]["mean"]) == (0, None, None)
    page = run("simulate", *ARGUMENTS, "--instances", 3, "--force")
    assert page.code == 0
    assert "3 instances, router round-robin" in page.out
    assert max(map(len, page.out.splitlines())) <= 80


def test_clients_that_wait_and_what_they_were_promised(run: Run, inputs: Path) -> None:
    """One client: E2E is 4.27 ms but the engine is done 20 us a token before; it sends again 1 s after the last token.

    TTFT 2.22 ms is within 3 ms, the gaps of 1.025 ms are not within 1 ms: no request is good.
    """
    closed = ("--set", "concurrency=1", "--set", "think_time_ms=1000", "--slo", "ttft.p99=3ms,itl.p50=1ms")
    answer = run("simulate", *ARGUMENTS, *closed)
    assert answer.code == 0, answer.err
    assert "SLO missed: ITL p50 1.02 of 1 ms; goodput 0.0% of the requests" in " ".join(answer.out.split())
    frame = pl.read_parquet(inputs / "run" / "requests.parquet")
    assert frame["e2e_us"].to_list() == [4270, 4270]
    assert frame["arrival_us"].to_list() == [0, 1_004_230]


def test_clients_that_wait_need_no_arrivals(run: Run, inputs: Path) -> None:
    """One client: each of 4.27 ms is sent when the engine is done with the one before, 40 us earlier.

    Without clients nothing says when requests come.  One arrival is missing, so those of the others order nothing.
    """
    table = "arrival_us,prompt_tokens,output_tokens\n9,100,3\n,100,3\n5,100,3\n"
    (inputs / "load.csv").write_text(table, "utf-8")
    refused = run("simulate", *ARGUMENTS)
    assert (refused.code, "line 3: has no arrival; give one of arrival_us" in refused.err) == (4, True)
    assert run("simulate", *ARGUMENTS, "--set", "concurrency=1").code == 0
    assert pl.read_parquet(inputs / "run" / "requests.parquet")["arrival_us"].to_list() == [0, 4_230, 8_460]


def test_turns_of_a_session_go_one_after_the_other(run: Run, inputs: Path) -> None:
    """One client, 4.27 ms a request: both of a's, then b's; without clients all come when they arrive."""
    table = "arrival_s,prompt_tokens,output_tokens,session\n0,100,3,a\n0,100,3,b\n0,100,3,a\n"
    (inputs / "load.csv").write_text(table, "utf-8")
    assert run("simulate", *ARGUMENTS, "--set", "concurrency=1").code == 0
    arrivals_us = pl.read_parquet(inputs / "run" / "requests.parquet")["arrival_us"].to_list()
    assert arrivals_us[0] < arrivals_us[2] < arrivals_us[1]
    assert "columns not used: session" in run("simulate", *ARGUMENTS, "--force").out


def test_an_arrival_trace_is_simulated_on_a_given_engine(run: Run, mooncake: Path) -> None:
    """The second and third prompts hit 512 of their 600 tokens: 1,024 of 1,800, in 32 blocks of 16 each."""
    (mooncake / "worked.yaml").write_text(RELEASE, "utf-8")
    (mooncake / "engine.yaml").write_text(ENGINE, "utf-8")
    given = ("--engine", "engine.yaml", "--coefficients", "worked.yaml", "--out", "run")
    answer = run("simulate", "--experiment", "mooncake", *given, "--json")
    assert answer.json["completed"] == 3
    assert answer.json["prefix_hit_rate"] == 1024 / 1800
    short = ENGINE.replace("4096", "512")
    (mooncake / "engine.yaml").write_text(short.replace("2048", "512"), "utf-8")
    refused = run("simulate", "--experiment", "mooncake", *given, "--force")
    assert (refused.code, refused.err.count("\n")) == (4, 1)
    assert "mooncake, request 0: a prompt of 600 tokens leaves no room in max_model_len 512" in refused.err
    assert run("simulate", *given).code == 2
    assert run("simulate", "--experiment", "mooncake", "--requests", "trace.jsonl", *given).code == 2


@pytest.mark.slow
def test_from_python_the_summary_is_that_of_the_command_line(run: Run, inputs: Path) -> None:
    """As the example of its docstring has it, with the files of this test."""
    answer = simulate("load.csv", "engine.yaml", "worked.yaml")
    assert answer.document == body(run("simulate", *ARGUMENTS, "--json").json)
    assert not answer.frame.is_empty()
