"""The ledger of counts on copies of live recordings, in which one source is made to contradict the others."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.ledger import (
    CLIENT,
    COUNTERS,
    DECODED,
    LOG,
    METRICS,
    STEP_RECORDS,
    STEPS,
    entries,
    ledger_table,
    warm_ups,
)
from blis_replay.ingest.checks.prefix_cache import uncached_prompt_tokens
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.checks.server import _Latency, _what_lies_between
from blis_replay.ingest.readers.discovery import only_source
from blis_replay.ingest.recording import FIRST_TOKEN, STAMPS, WAY, Finding, Recording
from blis_replay.replay.engine import with_engine
from blis_replay.replay.prefix_estimate import estimate_prefix

pytestmark = pytest.mark.slow

COLUMNS = "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms"
LIVE = "live-vllm-0.29"


@contextmanager
def read(folder: Path) -> Iterator[Recording]:
    with read_recording(replace(only_source(folder), columns=COLUMNS)) as recording:
        yield recording


def stops(folder: Path) -> list[Finding]:
    """What forbids a verdict or a metric."""
    with read(folder) as recording:
        return [finding for finding in run_checks(recording)[0] if finding.severity == "unusable"]


@pytest.fixture
def again(data_pack: Path, tmp_path: Path) -> Path:
    """A live run of 200 requests with a step log, spans and two snapshots of /metrics, to change."""
    return copied(data_pack / LIVE / "again", tmp_path)


def copied(folder: Path, to: Path) -> Path:
    made = to / "run"
    made.mkdir(exist_ok=True)
    for file in folder.iterdir():
        shutil.copyfile(file, made / file.name)
    return made


def rewrite_client(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / "client.csv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *change(rows)]) + "\n")


@pytest.mark.parametrize("name", ["again", "max-num-seqs-2", "q8c", "cold", "client-only", "gemma3"])
def test_sources_of_a_whole_run_agree(data_pack: Path, name: str) -> None:
    """Eight warm-up requests of another client are no contradiction, and neither is a first step of 16 s."""
    assert [f.message for f in stops(data_pack / LIVE / name) if f.check in ("ledger", "server_metrics")] == []


@pytest.mark.parametrize(
    ("lie", "quantity", "source"),
    [
        ("two-servers", "requests completed", "/metrics"),
        ("counts-x1.25", "decoded tokens", "server log"),
        ("step-log-of-another-run", "time span", "step records"),
    ],
)
def test_contradicting_files_stop_every_verdict(data_pack: Path, lie: str, quantity: str, source: str) -> None:
    found = stops(data_pack / LIVE / "lies" / lie)
    assert [(finding.check, finding.metric) for finding in found] == [("ledger", "")]
    assert f"{quantity}: {source}" in found[0].measured


def test_rows_that_are_missing_show_though_ids_are_numbered_anew(data_pack: Path, tmp_path: Path) -> None:
    folder = copied(data_pack / LIVE / "client-only", tmp_path)

    def tenth_missing(rows: list[str]) -> list[str]:
        kept = [row.partition(",")[2] for place, row in enumerate(rows) if place % 9]
        return [f"{number},{row}" for number, row in enumerate(kept)]

    rewrite_client(folder, tenth_missing)
    by_metrics, *_by_log = stops(folder)
    assert by_metrics.measured["requests completed: /metrics"] == 180
    assert by_metrics.measured["requests completed: client's requests"] == 160
    assert by_metrics.metric == ""


def test_steps_missing_in_the_middle_of_a_step_log_are_missing(again: Path) -> None:
    """A step log has every step, so what is left is no sample: its own counters say how many there were."""
    (path,) = again.glob("steps-*")
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[: len(lines) // 2] + lines[6 * len(lines) // 10 :])))
    (finding,) = stops(again)
    assert finding.metric == "step_time"
    assert set(finding.measured) == {f"{STEPS}: {COUNTERS}", f"{STEPS}: {STEP_RECORDS}"}


@pytest.mark.parametrize("with_metrics", [True, False])
def test_half_a_step_log_counts_no_prefix_hits(again: Path, with_metrics: bool) -> None:
    """Its tokens are half of those of the run, which is no hit rate of 50 %: /metrics beside it says 0."""
    for snapshot in again.glob("*.prom" if not with_metrics else "none"):
        snapshot.unlink()
    (log,) = again.glob("steps-*")
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    log.write_bytes(gzip.compress(b"".join(lines[: len(lines) // 2])))

    with read(again) as recording:
        decoded = {entry.source: entry.value for entry in entries(recording) if entry.quantity == DECODED}
        assert decoded[STEP_RECORDS] < 0.7 * decoded[CLIENT]
        assert uncached_prompt_tokens(recording) is None
        assert (estimate_prefix(recording).prefill_tokens == recording.requests["prompt_tokens"].to_numpy()).all()
    assert [(f.check, f.metric) for f in stops(again)] == [("ledger", "step_time")]


def test_the_table_says_what_each_source_states(data_pack: Path) -> None:
    with read(data_pack / LIVE / "client-only") as recording:
        rows = ledger_table(recording).records()
    stated = {(row["source"], row["states"]) for row in rows}
    assert {("/metrics", "36,633"), ("server log", "36,633"), ("server log", "7,075")} <= stated


@pytest.mark.parametrize(("name", "rate"), [("with-hit-rate", None), ("control", 0.0)])
def test_hits_of_preempted_requests_are_not_those_of_prompts(data_pack: Path, name: str, rate: float | None) -> None:
    """24.8 % by a log whose KV cache is full: prompts share nothing, and are replayed whole."""
    with read_recording(data_pack / "field" / "10-preemption-hit-rate" / name) as recording:
        assert recording.prefix_hit_rate == rate
        assert (estimate_prefix(recording).prefill_tokens == recording.requests["prompt_tokens"].to_numpy()).all()
        assert any("preempted" in line for line in recording.missing) == (name == "with-hit-rate")


def test_a_proxy_stops_ttft_and_e2e(data_pack: Path) -> None:
    found = stops(data_pack / LIVE / "lies" / "proxy-40ms")
    assert [(one.check, one.metric) for one in found] == [("server_metrics", WAY)]


def waiting(folder: Path, waits_ms: Sequence[float]) -> Finding:
    """What is said of client and server once each request of the client waited so long."""

    def late(row: str) -> str:
        fields, _tokens, ttft, latency = tokens_and_times(row)
        wait_ms = waits_ms[int(fields[0])]
        return ",".join([*fields[:4], f"{ttft + wait_ms:.3f}", f"{latency + wait_ms:.3f}", *fields[6:]])

    rewrite_client(folder, lambda rows: [late(row) for row in rows])
    with read(folder) as recording:
        found, _ = run_checks(recording)
    (finding,) = [one for one in found if one.check == "server_metrics" and one.metric]
    return finding


@pytest.mark.parametrize(
    ("shift_ms", "tail_ms", "proxy"),
    [(32.0, 0.0, True), (60.0, 20.0, True), (0.0, 80.0, False)],
    ids=["each waits", "each waits, some longer", "some wait"],
)
def test_a_tail_of_waits_is_no_proxy(again: Path, shift_ms: float, tail_ms: float, proxy: bool) -> None:
    """A proxy delays every request; a client without a core of its own delays some of them, and these for long."""
    waits_ms = shift_ms + tail_ms * np.random.default_rng(44).pareto(1.5, 1_000).clip(0, 20)
    finding = waiting(again, waits_ms.tolist())
    assert finding.metric == WAY
    # In `again` one request in ten waits 3 ms or less.
    assert finding.measured["each_request_us"] == pytest.approx(1e3 * shift_ms, abs=12_000)
    assert ("proxy or the network" in finding.message) == proxy


def test_a_server_that_gets_blocks_is_not_held_against_the_ttft_of_the_client(again: Path) -> None:
    """Before it another server prefills, here for a second."""
    assert waiting(again, [1_000.0] * 1_000).severity == "unusable"
    with read(again) as recording:
        apart = with_engine(recording, {"kv_transfer_config": "kv_connector=NixlConnector"}, "recorded")
        found, _ = run_checks(apart)
    assert [one.severity for one in found if one.check == "server_metrics"] == ["note"]


def test_a_client_whose_gaps_are_shorter_does_not_read_slowly(again: Path) -> None:
    """Means of a live vLLM 0.32 with ``--stream-interval 4`` on a busy machine, whose /metrics are the server's."""
    means_ms = {"ttft": (294.80, 263.33), "itl": (17.56, 17.94), "e2e": (698.19, 674.77)}
    pairs = [_Latency(name, 1e3 * client, 1e3 * server, 1e3 * server) for name, (client, server) in means_ms.items()]
    assert all(pair.way_us for pair in pairs)
    with read(again) as recording:
        assert _what_lies_between(pairs, recording)[0] == WAY


def test_without_stamps_of_the_server_a_way_has_no_name(again: Path) -> None:
    """Means alone are those of a proxy and of a busy client."""
    for path in (*again.glob("steps-*"), *again.glob("traces-*")):
        path.unlink()
    finding = waiting(again, [32.0] * 1_000)
    assert (finding.metric, "each_request_us" in finding.measured) == (WAY, False)


def tokens_and_times(row: str) -> tuple[list[str], int, float, float]:
    fields = row.split(",")
    return fields, int(fields[3]), float(fields[4]), float(fields[5])


def held_back(row: str) -> str:
    """The first event comes with the last."""
    fields, _tokens, _ttft, latency = tokens_and_times(row)
    return ",".join([*fields[:4], f"{latency:.3f}", *fields[5:]])


def reasoned(row: str) -> str:
    """Between 20 and 80 % of the time from the first token to the last has no event, by the request's number."""
    fields, _tokens, ttft, latency = tokens_and_times(row)
    share = 0.2 + 0.6 * (37 * int(fields[0]) % 101) / 101
    return ",".join([*fields[:4], f"{ttft + share * (latency - ttft):.3f}", *fields[5:]])


def read_slowly(row: str) -> str:
    """20 ms for each token in the client."""
    fields, tokens, _ttft, latency = tokens_and_times(row)
    return ",".join([*fields[:5], f"{latency + 20 * tokens:.3f}", *fields[6:]])


def read_late_and_slowly(row: str) -> str:
    """60 ms more for the first token too: a client whose every stamp is late."""
    fields, tokens, ttft, latency = tokens_and_times(row)
    return ",".join([*fields[:4], f"{ttft + 60:.3f}", f"{latency + 60 + 20 * tokens:.3f}", *fields[6:]])


@pytest.mark.parametrize(
    ("change", "with_metrics", "check", "metric"),
    [
        (held_back, False, "token_events", FIRST_TOKEN),
        (reasoned, False, "token_events", FIRST_TOKEN),
        (read_slowly, True, "server_metrics", "e2e"),
        (read_late_and_slowly, True, "server_metrics", STAMPS),
    ],
)
def test_what_a_client_did_not_see_in_time_is_not_used(
    data_pack: Path, tmp_path: Path, change: Callable[[str], str], with_metrics: bool, check: str, metric: str
) -> None:
    folder = copied(data_pack / LIVE / "client-only", tmp_path)
    rewrite_client(folder, lambda rows: [change(row) for row in rows])
    for snapshot in folder.glob("none" if with_metrics else "*.prom"):
        snapshot.unlink()
    assert [(one.check, one.metric) for one in stops(folder)] == [(check, metric)]


@pytest.mark.parametrize("kept", ["traces*", "metrics*", "steps*"])
def test_outputs_counted_in_words_are_no_tokens(again: Path, kept: str) -> None:
    """Three words for four tokens: each source of the server that counts tokens says so alone."""

    def in_words(rows: list[str]) -> list[str]:
        cells = [row.split(",") for row in rows]
        return [",".join([*c[:3], str(max(round(int(c[3]) * 0.75), 1)), *c[4:]]) for c in cells]

    rewrite_client(again, in_words)
    own = {*again.glob(kept), again / "client.csv"}
    for path in set(again.iterdir()) - own:
        path.unlink()
    found = [finding for finding in stops(again) if finding.check == "ledger"]
    assert found
    assert {name.partition(":")[0] for finding in found for name in finding.measured} == {DECODED}


# -- Aggregates of the client beside the server's counters ------------------------------------------------------------


def test_warm_ups_of_each_client_are_no_contradiction(data_pack: Path, tmp_path: Path) -> None:
    """InferenceX, EAGLE3 on an H200, 64 clients: 640 requests of the client and 768 of the server, so two each.

    Means of the server's sums: TTFT (2500.094 - 771.051) / 768 s, E2E (46637.456 - 14088.189) / 768 s.
    """
    source = data_pack / "inferencex" / "h200-gptoss"
    name = "nebius_results_spec_sweep_c64"
    for ending, kept in (("json", "result.json"), ("m0", "before.prom"), ("m1", "after.prom")):
        shutil.copyfile(source / f"{name}.{ending}", tmp_path / kept)
    with read_recording(tmp_path) as recording:
        found, _ = run_checks(recording)
        assert {one.quantity: (one.value, one.covers) for one in entries(recording) if one.source == METRICS}[
            "requests completed"
        ] == (768, "between snapshots, 2 warm-ups per client")
        assert warm_ups(recording, 127) == warm_ups(recording, 5 * 64) == 0
    (latencies,) = [finding for finding in found if finding.check == "server_metrics"]
    assert latencies.severity == "note"
    measured = {name: latencies.measured[name] for name in ("client_ttft_us", "server_ttft_us", "server_e2e_us")}
    assert measured == pytest.approx(
        {"client_ttft_us": 1_611_837, "server_ttft_us": 2_251_358, "server_e2e_us": 42_381_860}, rel=1e-5
    )
    assert not [one for one in found if one.check == "ledger" and "against" in one.message]


@pytest.mark.parametrize(("every", "contradicts"), [(1, False), (3, True)])
def test_the_log_of_a_server_shows_that_it_had_other_clients(again: Path, every: int, contradicts: bool) -> None:
    """The usual log has a line of throughput each 10 s; a third of the requests in a client's file is not the load."""
    for file in again.iterdir():
        if ("log" in file.name and "step" not in file.name) or file.suffix == ".csv":
            continue
        file.unlink()
    rewrite_client(again, lambda rows: rows[::every])
    with read(again) as recording:
        found = {e.source: e for e in entries(recording) if e.quantity == DECODED}
        assert found[LOG].covers == "throughput lines"
        assert found[LOG].contradicts(found[CLIENT]) == contradicts
    assert [(one.check, one.metric) for one in stops(again)] == ([("ledger", "")] if contradicts else [])
