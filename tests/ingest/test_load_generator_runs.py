"""Genuine files of load generators, as ingested, against the server's own record of the same run.

Server and client shared a host, so their clocks compare directly.  What may lie between them:

- a client stamps a send before it opens or picks a connection, so the server hears of it later: some
  milliseconds, up to 0.25 s where the request opens its connection (GuideLLM 0.3, the burst of a sweep);
- a client stamps an event when its event loop comes to it: a fraction of a millisecond, and a
  stall of its own now and then (garbage, another request), which is why tails have a bound apart;
- the server stamps an event after it has written it, so a quick client can be 0.3 ms earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from client_truth import ClientRun, clocks, compare, table_row, values

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.evidence import decode_gap_us
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.clients import guidellm
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import traces as otlp_traces

PAGE = (Path(__file__).parents[2] / "research" / "load-generators.md").read_text("utf-8").splitlines()

# Run -> the token layout that its stamps have.
LAYOUTS = {
    "aiperf-0.3.0/concurrency": "plain",
    "aiperf-0.3.0/poisson-chat": "plain",
    "aiperf-0.6.0/bos-rough": "several_tokens_per_event",
    "aiperf-0.6.0/concurrency": "plain",
    "aiperf-0.6.0/poisson-chat": "plain",
    "aiperf-0.13.0/bos-rough": "several_tokens_per_event",
    "aiperf-0.13.0/concurrency": "plain",
    "aiperf-0.13.0/faults-raw": "plain",
    "aiperf-0.13.0/poisson-chat": "plain",
    "guidellm-0.3.1/bos-rough": "no token events",
    "guidellm-0.3.1/constant": "no token events",
    "guidellm-0.4.0/constant": "no token events",
    "guidellm-0.5.4/constant": "no token events",
    "guidellm-0.5.4/sweep": "no token events",
    "inference-perf-0.1.1/random-poisson": "paired_with_done",
    "inference-perf-0.2.0/bos-rough": "several_tokens_per_event",
    "inference-perf-0.2.0/faults": "paired_with_done",
    "inference-perf-0.2.0/random-poisson": "paired_with_done",
    "inference-perf-0.2.0/shared-constant": "paired_with_done",
    "inference-perf-0.2.0/unary": "no token events",
    "inference-perf-0.3.0/shared-constant": "single_with_done",
    "inference-perf-0.4.0/bos-rough": "several_tokens_per_event",
    "inference-perf-0.4.0/random-poisson": "single_with_done",
    "inference-perf-0.4.0/shared-constant": "single_with_done",
    "inference-perf-0.5.0/bos-rough": "several_tokens_per_event",
    "inference-perf-0.5.0/random-poisson": "plain",
    "inference-perf-0.5.0/shared-constant": "plain",
    "inference-perf-0.6.1/bos-rough": "several_tokens_per_event",
    "inference-perf-0.6.1/shared-constant": "plain",
    "inference-perf-0.7.0/bos-rough": "several_tokens_per_event",
    "inference-perf-0.7.0/faults": "plain",
    "inference-perf-0.7.0/random-poisson": "plain",
    "inference-perf-0.7.0/shared-constant": "plain",
    "inference-perf-0.7.0/unary": "no token events",
    "vllm-bench-0.15.1/bos-rough": "several_tokens_per_event",
    "vllm-bench-0.15.1/chat-append": "role_first",
    "vllm-bench-0.15.1/faults": "plain",
    "vllm-bench-0.15.1/random-poisson": "plain",
}
# Its event loop stood still for seconds, twice: sends and reads of that time are late together.
STALLED = "inference-perf-0.1.1/random-poisson"
# Requests that the tool sends and does not report: probes of one token, a warm-up.
UNREPORTED = {
    "guidellm-0.3.1/constant": 21,
    "guidellm-0.3.1/bos-rough": 11,
    "aiperf-0.3.0/concurrency": 6,
    "aiperf-0.6.0/concurrency": 6,
    "aiperf-0.13.0/concurrency": 6,
}
# The client counts the prompt itself, without the BOS token that the server puts before it.
PROMPT_WITHOUT_BOS = ("aiperf-0.6.0/bos-rough", "vllm-bench-0.15.1/bos-rough")
# Tools that leave out events without text: their first token is the first that shows text.
SKIPS_EMPTY_EVENTS = (
    "aiperf-0.6.0/bos-rough",
    "aiperf-0.13.0/bos-rough",
    "guidellm-0.3.1/bos-rough",
    "inference-perf-0.5.0/bos-rough",
    "inference-perf-0.6.1/bos-rough",
    "inference-perf-0.7.0/bos-rough",
)
# No file of requests is in these.
WITHOUT_REQUESTS = {
    "guidellm-0.5.4/bos-rough": "no requests, no aggregates and no steps",
    "inference-perf-0.2.0/chat": "no requests, no aggregates and no steps",
    "inference-perf-0.4.0/chat": "no requests, no aggregates and no steps",
    "inference-perf-0.7.0/chat": "no requests, no aggregates and no steps",
}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(
    request: pytest.FixtureRequest, data_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientRun]:
    directory = data_pack / "clients" / request.param
    with read_recording(directory, profile={"model": "mock-model"}) as recording:
        yield compare(recording, directory, tmp_path_factory.mktemp("store") / "s.duckdb")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["run"])


def completed(run: ClientRun) -> pl.DataFrame:
    return run.pairs.filter(pl.col("status") == "ok")


def test_all_requests_and_what_became_of_them(run: ClientRun, name: str) -> None:
    assert len(run.pairs) == run.recording.requests.height
    assert len(run.unmatched) == UNREPORTED.get(name, 0)
    became = {"ok": "completed", "error": "failed", "aborted": "aborted"}
    assert run.pairs["status"].replace_strict(became).to_list() == run.pairs["outcome"].to_list()
    rejected = [(file.rejected_count, file.rejected[0][1]) for file in run.recording.files if file.rejected_count]
    # 0.13 records its warm-up too.
    assert rejected == ([(6, "of the warm-up phase, left out")] if name == "aiperf-0.13.0/concurrency" else [])


def test_requests_that_share_an_id_with_the_server_are_paired_by_it(run: ClientRun, name: str) -> None:
    """AIPerf gives the id, GuideLLM 0.5 keeps the server's; of a request that was cut off it had none."""
    with_ids = {"aiperf": 1.0, "guidellm-0.5.4": 0.97}
    share = next((share for tool, share in with_ids.items() if name.startswith(tool)), None)
    if share is not None:
        assert (run.pairs["request_id"] == run.pairs["known_as"]).mean() >= share


def test_send_times(run: ClientRun, name: str) -> None:
    lead_us = run.pairs["received_us"] - run.pairs["arrival_us"]
    # The epoch of a client that adds a monotonic clock to a start is off by its drift, some microseconds.
    assert lead_us.min() > -50
    assert lead_us.median() < (20_000 if name == STALLED else 5_000)
    assert lead_us.max() < 250_000
    assert run.pairs["arrival_us"].is_sorted()


def test_first_tokens(run: ClientRun, name: str) -> None:
    if name.endswith("unary"):
        assert completed(run)["ttft_us"].null_count() == len(completed(run))
        return
    late_us = (pl.col("arrival_us") + pl.col("ttft_us") - pl.col("first_token_us")).alias("late_us")
    late = completed(run).select(late_us)["late_us"]
    assert late.null_count() == 0
    assert late.min() > -300 and late.median() < 500  # type: ignore[operator]  # the column is int64
    # A first token without text costs up to two token gaps of about 15 ms.
    bound_us, share = (31_000, 0.90) if name in SKIPS_EMPTY_EVENTS else (5_000, 0.97)
    assert (late < 5_000).mean() >= share
    if name not in (STALLED, "aiperf-0.3.0/poisson-chat"):  # a stall of 67 ms there
        assert late.max() < max(bound_us, 20_000)  # type: ignore[operator]


def test_token_times(run: ClientRun, name: str) -> None:
    assert run.layout.name == LAYOUTS[name]
    if not run.layout.identified:
        assert not any(len(times) for times in run.token_us)
        return
    late: list[int] = []
    for row, times_us in zip(run.pairs.iter_rows(named=True), run.token_us, strict=True):
        if row["status"] == "ok":
            assert len(times_us) == row["decoded_tokens"]
            late += (times_us - np.array(row["token_events_us"])).tolist()
    assert np.median(late) < 500
    assert np.mean(np.abs(late) < 5_000) > (0.9 if name == STALLED else 0.98)


def test_the_true_gap(run: ClientRun, name: str) -> None:
    """Within 0.5 % of the server's from stamps of tokens, within 1 % from the ends of requests, whose E2E
    has the end of the stream in it, 0.1 ms in 34 gaps of 15 ms, or the re-tokenising, 1.5 ms."""
    done = completed(run)
    if name.endswith("unary"):
        return
    gaps, true_us = done["decoded_tokens"].sum() - len(done), (done["last_token_us"] - done["first_token_us"]).sum()
    gap_us, tolerance = (run.token_gap_us, 0.005) if run.token_gap_us else (decode_gap_us(done) or 0.0, 0.01)
    if name == STALLED:  # the stamps themselves are late: nothing in the file says so
        assert gap_us > 1.4 * true_us / gaps
    else:
        assert gap_us == pytest.approx(true_us / gaps, rel=tolerance)


def test_ends(run: ClientRun, name: str) -> None:
    """E2E goes to the last token (AIPerf, vllm bench) or to the end of the stream and what the client does then."""
    to_last_token = name.startswith(("aiperf", "vllm"))
    end = pl.col("last_token_us" if to_last_token else "end_us")
    late = completed(run).select((pl.col("arrival_us") + pl.col("e2e_us") - end).alias("late_us"))["late_us"]
    assert 0 < late.median() < 2_500  # type: ignore[operator]
    if name != STALLED:
        # An event without text at the end is left out by AIPerf: the last token is the one before, some 15 ms
        # earlier.  inference-perf ends when it has tokenised the text again, 20 ms the first time.
        assert (late.abs() < 25_000).mean() >= 0.97


def test_lengths(run: ClientRun, name: str) -> None:
    done = completed(run)
    assert done["output_tokens"].to_list() == done["decoded_tokens"].to_list()
    if name in PROMPT_WITHOUT_BOS:
        assert (done["true_prompt_tokens"] - done["prompt_tokens"]).to_list() == [1] * len(done)
    else:
        assert done["prompt_tokens"].to_list() == done["true_prompt_tokens"].to_list()
    known = run.pairs.filter(pl.col("status") != "ok").drop_nulls("prompt_tokens")
    assert known["prompt_tokens"].to_list() == known["true_prompt_tokens"].to_list()
    asked = run.pairs.drop_nulls("max_tokens")
    assert asked["max_tokens"].to_list() == asked["asked_tokens"].to_list()


@pytest.mark.parametrize(
    ("name", "severity", "says"),
    [
        # AIPerf divides by a count that has one or two tokens too many; with the server's count it is right.
        ("aiperf-0.3.0/concurrency", "corrected", "reported ITL 15.19 ms, true gap 15.64 ms"),
        ("aiperf-0.6.0/concurrency", "corrected", "reported ITL 15.22 ms, true gap 15.67 ms"),
        ("aiperf-0.13.0/poisson-chat", "corrected", "reported ITL 15.07 ms, true gap 15.55 ms"),
        # vllm bench pools gaps between events, of which one carries a role and some carry two tokens.
        ("vllm-bench-0.15.1/random-poisson", "note", "mean gap 15.58 ms"),
        ("vllm-bench-0.15.1/chat-append", "corrected", "reported ITL 15.36 ms, true gap 15.81 ms"),
        ("vllm-bench-0.15.1/bos-rough", "unusable", "reported ITL 15.71 ms, true gap 14.17 ms"),
        # GuideLLM's ITL is right; its TPOT is something else.
        ("guidellm-0.5.4/constant", "note", "reported ITL 15.73 ms agrees with the true gap 15.75 ms"),
        ("guidellm-0.5.4/constant", "note", "reported TPOT 16.63 ms is (last token - send) / n"),
        ("guidellm-0.3.1/constant", "note", "reported TPOT 15.12 ms is (last token - first token) / n"),
        # inference-perf: two stamps per token, then one and the closing one, then one for each re-tokenised token.
        ("inference-perf-0.2.0/random-poisson", "corrected", "reported ITL 7.47 ms, true gap 15.60 ms"),
        ("inference-perf-0.4.0/random-poisson", "corrected", "reported ITL 15.19 ms, true gap 15.62 ms"),
        ("inference-perf-0.5.0/shared-constant", "corrected", "reported ITL 7.72 ms, true gap 15.63 ms"),
        ("inference-perf-0.7.0/random-poisson", "note", "mean gap 15.62 ms"),
        (
            "inference-perf-0.7.0/random-poisson",
            "corrected",
            "reported TPOT 15.10 ms, but (E2E-TTFT)/(n-1) is 15.66 ms",
        ),
    ],
)
def test_findings_name_what_was_reported_and_what_is_true(data_pack: Path, name: str, severity: str, says: str) -> None:
    with read_recording(data_pack / "clients" / name, profile={"model": "mock-model"}) as recording:
        findings = [f for f in run_checks(recording)[0] if f.check == "token_events" and says in f.message]
    assert [finding.severity for finding in findings] == [severity]


@pytest.mark.parametrize(
    ("name", "severity", "says"),
    [
        ("aiperf-0.3.0/concurrency", "corrected", "3.2 % long on average (35.8 of 34.7 tokens)"),
        ("aiperf-0.6.0/bos-rough", "corrected", "2.4 % short on average (34.0 of 34.8 tokens)"),
        ("aiperf-0.13.0/bos-rough", "note", "equal the true ones (server usage)"),
        ("vllm-bench-0.15.1/random-poisson", "note", "equal the true ones (server usage)"),
        ("guidellm-0.3.1/constant", "note", "equal the true ones (configured with ignore_eos)"),
        ("inference-perf-0.5.0/shared-constant", "corrected", "100.0 % long on average (80.0 of 40.0 tokens)"),
    ],
)
def test_length_findings_name_both_numbers(data_pack: Path, name: str, severity: str, says: str) -> None:
    with read_recording(data_pack / "clients" / name, profile={"model": "mock-model"}) as recording:
        (finding,) = [f for f in run_checks(recording)[0] if f.check == "output_length"]
    assert finding.severity == severity and says in finding.message


def test_requests_that_the_client_gave_up_are_no_overload(data_pack: Path) -> None:
    """8 of 98: the end of a benchmark cuts off what is under way; it says nothing of the server."""
    with read_recording(data_pack / "clients" / "guidellm-0.5.4" / "constant") as recording:
        findings = run_checks(recording)[0]
    messages = [finding.message for finding in findings if finding.check == "completeness"]
    assert len(messages) == 1 and messages[0].startswith("the client itself gave up 8 of 98 requests")
    assert not [finding for finding in findings if finding.check == "overloaded"]


@pytest.mark.parametrize("name", WITHOUT_REQUESTS)
def test_a_folder_without_requests_is_refused_in_one_line(data_pack: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordingError, match=WITHOUT_REQUESTS[name]) as caught:
        ingest_source(tmp_path / "s.duckdb", data_pack / "clients" / name)
    assert "\n" not in str(caught.value)
    assert f"- {name}: {caught.value.problem}" in PAGE


@pytest.mark.slow
def test_the_page_has_the_rows_of_every_run(run: ClientRun, name: str) -> None:
    assert table_row(name, *values(run)) in PAGE
    assert table_row(name, *clocks(run)) in PAGE


def test_guidellm_0_6_against_the_spans_of_a_real_vllm(data_pack: Path, tmp_path: Path) -> None:
    """blis-eval: 200 requests of GuideLLM 0.6.0.dev2, 197 of them with a span of vLLM 0.11; 3 had no token to decode.

    The server's arrival is its span's start, after HTTP and tokenising (3,000 prompt tokens): 5 to 31 ms after
    the send.  TTFT and E2E are longer by that on the client's side, and by 2 ms back.
    """
    folder = data_pack / "blis-eval" / "jan20-prefill-llama7b-tp1-1"
    read = guidellm.read_requests(RecordedFile(folder / "guidellm-results.json.gz", "g"), tmp_path / "stamps")
    spans = otlp_traces.read_traces([RecordedFile(folder / "traces.json.gz", "t")]).requests
    assert spans is not None
    assert (read.version, len(read.stages), len(read.frame)) == ("guidellm 0.6.0.dev2", 5, 200)
    both = read.frame.with_columns(pl.col("request_id") + "-0").join(spans.frame, on="request_id", suffix="_server")
    assert len(both) == 197
    assert both["prompt_tokens"].to_list() == both["prompt_tokens_server"].to_list()
    assert both["output_tokens_reported"].to_list() == both["output_tokens_reported_server"].to_list()
    lead_us = both["sent_us_server"] - both["sent_us"]
    assert lead_us.min() > 4_000 and lead_us.max() < 32_000  # type: ignore[operator]
    for latency in ("ttft_us", "e2e_us"):
        rest_us = both[latency] - both[f"{latency}_server"] - lead_us
        assert rest_us.min() > 0 and rest_us.median() < 3_000 and rest_us.max() < 12_000  # type: ignore[operator]
