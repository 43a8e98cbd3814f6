"""Numbers of `field` and `inferencex` as stored, against the same numbers worked out here from the files alone."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import only_source
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.served import published
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.observed import Selection, numbers_from_requests, observed_requests, samples_of


def samples(recording: Recording) -> tuple[LatencySamples, dict[str, float]]:
    """Latencies of the requests, and their means in ms."""
    found = samples_of(recording, observed_requests(recording))
    numbers = numbers_from_requests(recording, found, Selection(), None)
    means = {metric: numbers[metric]["mean"].value_us for metric in ("e2e", "ttft", "itl")}
    return found, {metric: us / 1e3 for metric, us in means.items() if us is not None}


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["h200_gptoss_gt_c4", "h200_gptoss_gt_c64"])
def test_requests_of_inferencex_without_send_times(data_pack: Path, name: str) -> None:
    """TTFT is kept for each request, and the E2E is TTFT + mean TPOT x (n - 1): the file's own mean within 0.5 %."""
    file = data_pack / "inferencex" / "h200-gptoss" / f"{name}.json"
    said = json.loads(file.read_text("utf-8"))
    with read_recording(only_source(file)) as recording:
        found, means = samples(recording)
    assert found.output_tokens.sum() == said["total_output_tokens"]
    assert found.ttft_us / 1e6 == pytest.approx(said["ttfts"], abs=1e-6)
    assert means["ttft"] == pytest.approx(said["mean_ttft_ms"], rel=1e-6)
    pairs = zip(said["ttfts"], said["output_lens"], strict=True)
    rebuilt_ms = fmean(1e3 * ttft_s + said["mean_tpot_ms"] * (tokens - 1) for ttft_s, tokens in pairs)
    assert means["e2e"] == pytest.approx(rebuilt_ms, rel=1e-5)
    assert means["e2e"] == pytest.approx(said["mean_e2el_ms"], rel=5e-3)


@pytest.mark.realdata
@pytest.mark.parametrize(
    "name",
    [
        "inferencex/h200-gptoss/h200_gptoss_cf_c64_b10_r1.json",
        "inferencex/h200-gptoss/nebius_results_exp_sweep_c64.json",
        "field/03-rate-and-cap/rate10-cap1.json",
        "field/04-default-bench-no-e2el/inf-cap1.json",
    ],
)
def test_a_summary_of_vllm_bench(data_pack: Path, name: str) -> None:
    """What the file states, in ms; `e2el` stands in some of them only."""
    said = json.loads((data_pack / name).read_text("utf-8"))
    with read_recording(only_source(data_pack / name)) as recording:
        for metric, theirs in (("ttft", "ttft"), ("tpot_reported", "tpot"), ("itl_reported", "itl"), ("e2e", "e2el")):
            for statistic, stated in (("mean", "mean"), ("p50", "median"), ("p99", "p99")):
                expected, value_us = (
                    said.get(f"{stated}_{theirs}_ms"),
                    published(recording.aggregates, -1, metric, statistic),
                )
                found_ms = None if value_us is None else value_us / 1e3
                assert found_ms == (None if expected is None else pytest.approx(expected, rel=1e-6)), (
                    metric,
                    statistic,
                )


@pytest.mark.realdata
def test_turns_of_inferencex_as_a_table(data_pack: Path) -> None:
    """A row a turn, of DeepSeek-V4 on four GB300; the summary of the same run agrees to its two digits."""
    file = data_pack / "inferencex" / "gb300-dsv4" / "dsv4_b1_raw_conc64.jsonl.gz"
    rows: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    columns = "arrival=64:in-flight,prompt_tokens=isl,output_tokens=osl,ttft=ttft_ms:ms,e2e=e2e_ms:ms"
    with read_recording(replace(only_source(file), columns=columns)) as recording:
        found, means = samples(recording)
    assert len(found.e2e_us) == len(rows) == 1_769
    for metric in ("ttft", "e2e"):
        assert means[metric] == pytest.approx(fmean(row[f"{metric}_ms"] for row in rows), rel=1e-6)
    gaps = [(row["e2e_ms"] - row["ttft_ms"], row["osl"] - 1) for row in rows if row["osl"] > 1]
    assert means["itl"] == pytest.approx(sum(ms for ms, _ in gaps) / sum(count for _, count in gaps), rel=1e-5)
    summary = json.loads((file.parent / "dsv4_b1_conc64.json").read_text("utf-8"))
    assert means["e2e"] == pytest.approx(summary["e2e_ms"]["mean"], abs=0.01)
    assert found.output_tokens.sum() == summary["output_tokens_total"]
