"""Ground truth that is a summary: means and percentiles of a load generator, and no request."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

ENGINE = (
    "max_num_seqs: 128\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: true\n"
    "tensor_parallel_size: 2\n"
)
MODEL = "codellama/CodeLlama-34b-Instruct-hf"


def bench(summary: Any, rate: float | str, clients: int | None) -> str:
    """What ``vllm bench serve`` writes without ``--save-detailed``, of a summary of ``simulate``."""
    latencies, requests, duration_s = summary["latencies_ms"], summary["requests"], summary["duration_s"]
    document = {
        **{"tokenizer_id": MODEL, "model_id": MODEL, "backend": "openai", "request_rate": rate},
        **{"max_concurrency": clients, "num_prompts": requests, "completed": requests, "failed": 0},
        **{"duration": duration_s, "request_throughput": requests / duration_s},
        **{"total_input_tokens": summary["prompt_tokens"], "total_output_tokens": summary["output_tokens"]},
        **{f"mean_{name}_ms": latencies[of]["mean"] for name, of in {"ttft": "ttft", "e2el": "e2e"}.items()},
        **{f"p99_{name}_ms": latencies[of]["p99"] for name, of in {"ttft": "ttft", "e2el": "e2e"}.items()},
    }
    return json.dumps(document)


def genai(summary: Any, _rate: float | str, clients: int | None) -> str:
    """What genai-bench writes: each request with its times, and not when it was sent; all have the means here."""
    latencies = summary["latencies_ms"]
    request = {
        **{"ttft": latencies["ttft"]["mean"], "e2e_latency": latencies["e2e"]["mean"], "error_code": None},
        **{"num_input_tokens": 500, "num_output_tokens": 100},
    }
    metrics = {"individual_request_metrics": [request] * summary["requests"], "_time_unit": "ms"}
    return json.dumps({"aggregated_metrics": {"num_concurrency": clients}} | metrics)


def aiperf(summary: Any, rate: float | str, clients: int | None) -> str:
    """AIPerf's ``profile_export_aiperf.json`` without the records beside it, as 0.13 writes it."""
    latencies = summary["latencies_ms"]
    phase = {"kind": "profiling", "concurrency": clients} if clients else {"kind": "profiling", "rate": rate}
    document = {
        "input_config": {"models": {"items": [{"name": MODEL}]}, "phases": [phase]},
        "request_count": {"unit": "requests", "avg": summary["requests"]},
        "request_throughput": {"unit": "requests/sec", "avg": summary["requests"] / summary["duration_s"]},
        "input_sequence_length": {"unit": "tokens", "avg": 500},
        "output_sequence_length": {"unit": "tokens", "avg": 100},
        "request_latency": {"unit": "ms", "avg": latencies["e2e"]["mean"]},
        "time_to_first_token": {"unit": "ms", "avg": latencies["ttft"]["mean"]},
    }
    return json.dumps(document)


def guidellm(summary: Any, rate: float | str, clients: int | None) -> str:
    """GuideLLM's CSV of one load level, as 0.5 writes it; the columns that are read."""
    latencies, requests = summary["latencies_ms"], summary["requests"]
    strategy = {"type_": "concurrent", "streams": clients} if clients else {"type_": "poisson", "rate": rate}
    cells = {
        ("Run Info", "Run ID", ""): "r",
        ("Run Info", "Run Index", ""): 0,
        ("Run Info", "Profile", ""): json.dumps({"completed_strategies": [strategy]}),
        ("Timings", "Duration", "Sec"): summary["duration_s"],
        **{("Request Counts", status, ""): requests for status in ("Successful", "Total")},
        ("Request Latency", "Successful Sec", "Mean"): latencies["e2e"]["mean"] / 1e3,
        ("Time to First Token", "Successful ms", "Mean"): latencies["ttft"]["mean"],
        ("Token Metrics", "Successful Input Tokens", "Mean"): 500,
        ("Token Metrics", "Successful Output Tokens", "Mean"): 100,
    }
    text = io.StringIO()
    csv.writer(text).writerows([*zip(*cells, strict=True), cells.values()])
    return text.getvalue()


def levels(summary: Any, rate: float | str, clients: int | None) -> str:
    """A table of one load level."""
    latencies, load = summary["latencies_ms"], ("concurrency", clients) if clients else ("rate", rate)
    cells = {
        **{load[0]: load[1], "num_prompts": summary["requests"], "isl": 500, "osl": 100},
        **{f"mean_{name}_ms": latencies[name]["mean"] for name in ("ttft", "tpot")},
    }
    return "\n".join(",".join(map(str, line)) for line in (cells, cells.values()))


def ingest_summary(
    run: Run,
    folder: Path,
    lengths: Sequence[tuple[int, int]],
    gap_s: float,
    clients: int | None,
    written: Callable[[Any], str],
) -> None:
    """Simulate requests of these lengths, and ingest what a tool writes of it."""
    (folder / "engine.yaml").write_text(ENGINE)
    rows = "".join(f"{gap_s * i:.3f},{prompt},{output}\n" for i, (prompt, output) in enumerate(lengths))
    (folder / "load.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    options = ["--coefficients", "h100-vllm-0.15.1", "--model", MODEL, "--out", "made", "--json"]
    loop = ["--set", f"concurrency={clients}"] if clients else []
    simulated = run("simulate", "--requests", "load.csv", "--engine", "engine.yaml", *options, *loop).json
    (folder / "34b-bench").mkdir()
    totals = dict(zip(("prompt_tokens", "output_tokens"), map(sum, zip(*lengths, strict=True)), strict=True))
    (folder / "34b-bench" / "result.json").write_text(written(simulated | totals))
    assert run("ingest", folder / "34b-bench", "--engine", "engine.yaml", "--model", MODEL).code == 0


SENT = [(bench, "inf", 8), (bench, "inf", None), (bench, 5.0, None), (genai, "inf", 8), (aiperf, "inf", 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "rate", "clients"),
    [*SENT, *((tool, *load) for tool in (guidellm, levels) for load in (("inf", 8), (5.0, None))), (aiperf, 5.0, None)],
)
def test_a_summary_is_replayed_as_the_load_that_it_states(
    run: Run, tmp_path: Path, written: Callable[..., str], rate: float | str, clients: int | None
) -> None:
    """Of 200 requests of 500 and 100 tokens, simulated by the same release: its own numbers come out again.

    Within 5 % (TTFT 15 %): lengths are spread, and when each came is drawn anew.
    """
    gap_s = 0.2 if isinstance(rate, float) else 0.0
    lengths = [(450 + i % 101, 90 + i % 21) for i in range(200)]
    ingest_summary(run, tmp_path, lengths, gap_s, clients, lambda of: written(of, rate, clients))
    (experiment,) = run("validate", "34b-bench", "--json").json["experiments"]
    assert experiment["ground_truth"] == "published aggregates"
    assert experiment["provenance"]["basis"]["requests"].startswith("made of a summary")
    errors = {metric: experiment["metrics"][metric]["mean"]["error"] for metric in ("e2e", "ttft")}
    assert errors["e2e"] == pytest.approx(0, abs=0.05)
    assert errors["ttft"] == pytest.approx(0, abs=0.15)
    assert (experiment["metrics"]["ttft"]["p90"]["observed_ms"] is None) == (written is not genai)
    assert run("validate", "34b-bench", "--json").json["experiments"][0]["metrics"] == experiment["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("written", [bench, levels])
def test_clients_that_send_equal_requests_go_in_step(run: Run, tmp_path: Path, written: Callable[..., str]) -> None:
    """16 clients send 200 requests of 500 and 100 tokens: their prompts are computed together, each time.

    A total of ``vllm bench`` that is a multiple of the requests says that they are equal.  A table of means does not;
    of lengths that are spread by 10 % the TTFT is less than half, so it decides nothing.
    """
    ingest_summary(run, tmp_path, [(500, 100)] * 200, 0.0, 16, lambda of: written(of, "inf", 16))
    (experiment,) = run("validate", "34b-bench", "--json").json["experiments"]
    judged = {one["key"]: one for one in experiment["judgement"]["judged"]}
    if written is bench:
        assert judged["ttft"]["error"] == pytest.approx(0, abs=0.01)
    else:
        assert judged["ttft"]["error"] < -0.4
        assert (judged["ttft"]["state"], judged["ttft"]["interval"][1] > 0) == ("undecided", True)


@pytest.mark.slow
def test_a_summary_that_does_not_say_how_long_its_requests_were(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "34b-bench"
    folder.mkdir()
    summary = {"tokenizer_id": MODEL, "model_id": MODEL, "num_prompts": 10, "request_rate": 1.0, "duration": 10.0}
    (folder / "result.json").write_text(json.dumps(summary | {"completed": 10, "mean_ttft_ms": 40.0}))
    (tmp_path / "engine.yaml").write_text(ENGINE)
    run("ingest", folder, "--engine", "engine.yaml")
    answer = run("validate", "34b-bench", "--json")
    assert answer.code == 4
    (why,) = answer.json["not_judged"].values()
    assert why.startswith("its summary does not say its prompt tokens in stage 0")


@pytest.mark.slow
def test_a_load_level_needs_no_engine_arguments(run: Run, tmp_path: Path) -> None:
    """What the row does not say of its server is assumed, and the longest request stands for max_model_len."""
    folder = tmp_path / "34b-bench"
    folder.mkdir()
    row = f"{MODEL},H100,2,0.15.1,4,100,20,50,15\n"
    (folder / "points.csv").write_text(f"model,gpu,tp,vllm_version,concurrency,isl,osl,ttft_ms,tpot_ms\n{row}")
    assert run("ingest", folder / "points.csv").code == 0
    (experiment,) = run("validate", "34b-bench", "--json").json["experiments"]
    assert experiment["metrics"]["ttft"]["mean"]["observed_ms"] == 50
    assert experiment["provenance"]["basis"]["max_model_len"].endswith("of the longest request, as the server took it")
    assert not run("explain", "34b-bench").err


@pytest.mark.slow
def test_prompts_of_a_load_level_fit_as_the_server_took_them(run: Run, tmp_path: Path) -> None:
    """A mean of 1,000 spread by 10 % made prompts of 1,100; in 1,024 there is room for 2.3 %.

    A mean that does not fit itself is refused, with the name of the experiment.
    """
    (tmp_path / "levels.csv").write_text(
        f"model,gpu,tp,concurrency,isl,osl,ttft_ms,tpot_ms\n{MODEL},H100,2,4,1000,20,50,15\n"
    )
    for name, most in (("fits", 1024), ("too-long", 900)):
        (tmp_path / f"{name}.yaml").write_text(ENGINE.replace("4096", str(most)))
        options = ("--engine", tmp_path / f"{name}.yaml", "--name", name)
        assert run("ingest", tmp_path / "levels.csv", *options).code == 0
    (experiment,) = run("validate", "fits", "--json").json["experiments"]
    assert "prompts as far as max_model_len has room" in experiment["provenance"]["basis"]["requests"]
    assert run("validate", "too-long").err.startswith("error: 34b-too-long: request 0: a prompt of 1000 tokens")
