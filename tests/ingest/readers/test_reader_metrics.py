"""Snapshots of ``/metrics``: what happened between two of them, old and new names, restarts, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import recorded_file
from growth import ONE_PASS, growth

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.ledger import CLIENT, COMPLETED, DECODED, METRICS, PROMPT, entries
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.readers.server.metrics import MAX_LINE_BYTES, MetricsRead, read_metrics, recognises
from blis_replay.ingest.recording import WAY, Finding

CACHE = 'block_size="128",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="512",sliding_window="None"'


def snapshot(requests: int, ttft_s: float = 0.25, itl_s: float = 0.02, engine: str = "0") -> str:
    """A server that has completed so many requests of 100 prompt and 11 output tokens, a tenth of them cached."""
    labels = f'{{engine="{engine}",model_name="my/model"}}'
    reason = f'{{engine="{engine}",finished_reason="REASON",model_name="my/model"}}'
    gaps = 10 * requests
    return f"""# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
python_info{{implementation="CPython"}} 1.0
vllm:request_success_total{reason.replace("REASON", "length")} {requests}.0
vllm:request_success_total{reason.replace("REASON", "abort")} 1.0
vllm:prompt_tokens_total{labels} {100 * requests}.0
vllm:generation_tokens_total{labels} {11 * requests}.0
vllm:num_preemptions_total{labels} {2 * requests}.0
vllm:prefix_cache_queries_total{labels} {100 * requests}.0
vllm:prefix_cache_hits_total{labels} {10 * requests}.0
vllm:kv_cache_usage_perc{labels} 0.0
vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="+Inf",model_name="my/model"}} {requests}.0
vllm:time_to_first_token_seconds_count{labels} {requests}.0
vllm:time_to_first_token_seconds_sum{labels} {requests * ttft_s}
vllm:inter_token_latency_seconds_count{labels} {gaps}.0
vllm:inter_token_latency_seconds_sum{labels} {gaps * itl_s}
vllm:e2e_request_latency_seconds_count{labels} {requests}.0
vllm:e2e_request_latency_seconds_sum{labels} {requests * (ttft_s + 10 * itl_s)}
vllm:cache_config_info{{engine="{engine}",{CACHE}}} 1.0
"""


# Names of 0.9 and before, of which 0.11 still has some.
OLD = """vllm:request_success_total{finished_reason="stop",model_name="m"} 4.0
vllm:gpu_prefix_cache_queries_total{model_name="m"} 400.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 100.0
vllm:time_per_output_token_seconds_count{model_name="m"} 40.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.8
vllm:cache_config_info{block_size="16",num_gpu_blocks="None",enable_prefix_caching="False",note="a \\"b\\" } c"} 1.0
"""


def read(folder: Path, *texts: str) -> MetricsRead:
    files = [recorded_file(folder, text, f"{number}.prom") for number, text in enumerate(texts)]
    found = read_metrics(files)
    assert [file.tally.rejected_count for file in files] == [0] * len(files)
    return found


def said(found: MetricsRead) -> dict[tuple[str, str], float]:
    return {(metric, name): value for _stage, metric, name, value in found.aggregates.iter_rows()}


def test_two_snapshots_say_what_happened_between_them(tmp_path: Path) -> None:
    """40 requests by 100; in whatever order the files come."""
    found = read(tmp_path, snapshot(140), snapshot(100))
    numbers = said(found)
    assert (numbers["server_requests", "succeeded"], numbers["server_requests", "failed"]) == (40, 0)
    assert (numbers["server_prompt_tokens", "sum"], numbers["server_output_tokens", "sum"]) == (4_000, 440)
    assert (numbers["server_ttft", "count"], numbers["server_itl", "count"]) == (40, 400)
    assert numbers["server_ttft", "mean"] == pytest.approx(250_000)
    assert numbers["server_itl", "mean"] == pytest.approx(20_000)
    assert numbers["server_preemptions", "sum"] == 80
    assert (found.prefix_hit_rate, found.model, found.remarks) == (0.1, "my/model", ())
    assert found.engine == {
        "block_size": 128,
        "num_gpu_blocks": 512,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "auto",
    }


def drafted(drafts: int, tokens: int) -> str:
    """A server that drafted twice for each token: the first accepted in 7 of 10, the second in 4 of 10."""
    labels = 'engine="0",model_name="my/model"'
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return f"""vllm:request_success_total{{engine="0",finished_reason="length",model_name="my/model"}} 10.0
vllm:generation_tokens_total{{{labels}}} {tokens}.0
vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}.0
vllm:spec_decode_num_draft_tokens_total{{{labels}}} {2 * drafts}.0
{per_position}{{{labels},position="0"}} {drafts * 0.7}
{per_position}{{{labels},position="1"}} {drafts * 0.4}
"""


def test_the_counters_of_drafts_are_the_acceptance_by_position(tmp_path: Path) -> None:
    """10 requests of 211 tokens, 1,000 drafts: 1,100 tokens accepted, 1,000 steps that verified, each with drafts."""
    engine = read(tmp_path, drafted(1000, 2110)).engine
    assert engine == {"speculative_acceptance": [0.7, 0.4]}


def test_steps_without_drafts_show_how_often_the_drafter_finds_something(tmp_path: Path) -> None:
    """3,110 tokens less 10 first ones less 1,100 accepted: 2,000 steps that could verify, of which 1,000 did."""
    engine = read(tmp_path, drafted(1000, 3110)).engine
    assert engine == {"speculative_acceptance": [0.7, 0.4], "speculative_drafted_share": 0.5}


def test_without_drafts_nothing_is_said_of_them(tmp_path: Path) -> None:
    assert read(tmp_path, drafted(0, 110)).engine == {}


def test_one_snapshot_counts_from_the_start_and_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, snapshot(3))
    assert said(found)["server_requests", "succeeded"] == 3
    assert "a second snapshot of /metrics" in found.remarks[0]


def test_one_snapshot_before_the_first_request_counts_nothing_of_the_run(tmp_path: Path) -> None:
    """A server that was killed has no snapshot behind the run; its cache configuration is known all the same."""
    found = read(tmp_path, snapshot(0))
    assert found.aggregates.is_empty()
    assert found.engine["num_gpu_blocks"] == 512


def test_counters_of_several_engines_are_added_and_other_configurations_named(tmp_path: Path) -> None:
    other = snapshot(2, engine="1").replace('num_gpu_blocks="512"', 'num_gpu_blocks="511"')
    found = read(tmp_path, snapshot(1) + other, snapshot(0))
    assert said(found)["server_requests", "succeeded"] == 3
    assert any("the 2 engines" in remark and "the first is used" in remark for remark in found.remarks)


def test_a_server_that_was_started_again_gives_no_difference(tmp_path: Path) -> None:
    """Its tokens began again, and it has done more requests since."""
    again = snapshot(200).replace("vllm:prompt_tokens_total", "vllm:not_a_counter")
    found = read(tmp_path, snapshot(100), again + 'vllm:prompt_tokens_total{model_name="my/model"} 5.0\n')
    assert found.aggregates.is_empty()
    assert "started again between them" in found.remarks[0]


def test_old_names_are_read_and_none_is_not_known(tmp_path: Path) -> None:
    found = read(tmp_path, OLD)
    assert (found.prefix_hit_rate, said(found)["server_itl", "mean"]) == (0.25, pytest.approx(20_000))
    assert found.engine == {"block_size": 16, "enable_prefix_caching": False}


def test_what_is_no_sample_is_counted(tmp_path: Path) -> None:
    said = 'vllm:a_total{x="1} 5\nvllm:a_total 1e999\nvllm:a_total -5\nvllm:a_total\nvllm:a_total NaN\n'
    file = recorded_file(tmp_path, said)
    read_metrics([file])
    assert [place for place, _why in file.tally.rejected] == ["line 1", "line 2", "line 3", "line 4"]


@pytest.mark.parametrize("piece", ['a="",', 'a="\\\\', "a", 'a="x" '])
def test_time_grows_with_the_length_of_a_line(tmp_path: Path, piece: str) -> None:
    """Labels that never end."""

    def work(size: int) -> None:
        read_metrics([recorded_file(tmp_path, f"vllm:a_total{{{piece * (size // len(piece))}\n" * 20)])

    assert growth(work, MAX_LINE_BYTES // 5) < ONE_PASS


def test_snapshots_are_known_by_content() -> None:
    assert recognises(snapshot(1).encode())
    assert not recognises(b"INFO vllm:x 5\n")


SIDES = ("client", "server")


def findings(folder: Path, before: str, after: str, requests: int = 40, ttft_s: float = 0.252) -> list[Finding]:
    """What is found where the client has these requests of 100 prompt and 11 output tokens, each 0.2 s behind TTFT."""
    folder.mkdir(exist_ok=True)
    (folder / "before.prom").write_text(before)
    (folder / "after.prom").write_text(after)
    rows = [f"{i},100,11,{ttft_s},{ttft_s + 0.2}" for i in range(requests)]
    (folder / "mine.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s", *rows]))
    with read_recording(folder) as recording:
        assert recording.model == "my/model"
        assert (recording.engine["block_size"].value, recording.engine["block_size"].detail) == (128, "/metrics")
        found = run_checks(recording)[0]
        return [finding for finding in found if finding.check in ("ledger", "server_metrics")]


@pytest.mark.parametrize(
    ("before", "after", "severity", "served"),
    [
        (snapshot(100), snapshot(140), "note", 40),
        (snapshot(100), snapshot(141), "note", 41),
        # Ten more than the client's 40 may have warmed the server up; of more the replay would know nothing.
        (snapshot(100), snapshot(150), "note", 50),
        (snapshot(100), snapshot(151), "unusable", 51),
        # One snapshot counts what came before the run, too.
        ("", snapshot(400), "note", 400),
        ("", snapshot(25), "unusable", 25),
        # As many fewer: requests went to another server.
        (snapshot(100), snapshot(130), "note", 30),
        (snapshot(100), snapshot(129), "unusable", 29),
        # One token more per prompt: BOS.
        (snapshot(100), snapshot(140).replace('my/model"} 14000.0', 'my/model"} 14040.0'), "note", 40),
    ],
)
def test_requests_of_client_and_server_differ_by_ten_at_most(
    tmp_path: Path, before: str, after: str, severity: str, served: int
) -> None:
    counts, *_latencies = findings(tmp_path / "run", before, after)
    assert (counts.check, counts.severity, counts.metric) == ("ledger", severity, "")
    if severity == "unusable":
        assert counts.measured["requests completed: /metrics"] == served


def test_mean_latencies_agree_or_not(tmp_path: Path) -> None:
    """The client's TTFT is 2 ms longer, which is the way, or 50 ms shorter, which is not."""
    _counts, latencies = findings(tmp_path / "run", snapshot(100), snapshot(140))
    both = {"ttft": (252_000, 250_000), "itl": (20_000, 20_000), "e2e": (452_000, 450_000)}
    assert latencies.measured == pytest.approx(
        {f"{side}_{name}_us": us for name, pair in both.items() for side, us in zip(SIDES, pair, strict=True)}
    )
    _counts, agree, apart = findings(tmp_path / "run", snapshot(100), snapshot(140), ttft_s=0.2)
    assert [list(finding.measured) for finding in (agree, apart)] == [
        [f"{side}_{name}_us" for name in names for side in SIDES] for names in (["itl"], ["ttft", "e2e"])
    ]
    assert (apart.severity, apart.metric) == ("unusable", WAY)


def test_a_way_is_named_and_what_it_is_part_of_is_not_used(tmp_path: Path) -> None:
    """100 ms more for first and last token alike, gaps equal.  A warm-up that took long on the server is no proxy."""
    _counts, _agree, apart = findings(tmp_path / "run", snapshot(100), snapshot(140), ttft_s=0.35)
    assert (apart.severity, apart.metric) == ("unusable", WAY)
    assert apart.measured["client_ttft_us"] - apart.measured["server_ttft_us"] == pytest.approx(100_000)
    slow = snapshot(141).replace(f"{141 * 0.25}", f"{141 * 0.25 + 16}").replace(f"{141 * 0.45}", f"{141 * 0.45 + 16}")
    assert [f.severity for f in findings(tmp_path / "slow", snapshot(100), slow)] == ["note", "note"]


def test_a_real_server_agrees_with_its_client(data_pack: Path) -> None:
    """vLLM 0.32.0 on a CPU: 3 warm-up requests of 126 prompt and 30 output tokens, and 6 ms between the TTFTs."""
    with read_recording(data_pack / "live-vllm-0.32" / "A") as recording:
        assert {name: recording.engine[name].value for name in ("block_size", "num_gpu_blocks")} == {
            "block_size": 128,
            "num_gpu_blocks": 512,
        }
        (latencies,) = (f for f in run_checks(recording)[0] if f.check == "server_metrics")
        counted = {entry.quantity: entry.value for entry in entries(recording) if entry.source == METRICS}
        sent = {entry.quantity: entry.value for entry in entries(recording) if entry.source == CLIENT}
    assert counted[COMPLETED] - sent[COMPLETED] == 3
    assert counted[PROMPT] - sent[PROMPT] == 3 * 126
    assert counted[DECODED] - sent[DECODED] == 3 * 29
    assert "agree: TTFT 61.87 against 58.28 ms, ITL 10.16 against 10.16 ms" in latencies.message
