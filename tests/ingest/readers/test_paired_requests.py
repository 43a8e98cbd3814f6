"""Requests that client and server both recorded: what pairs of them say of the two clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from builders import read_frame
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.pairing import BY_CLOCK, BY_CONTENT, BY_IDS, BY_NUMBERS, Alignment, paired


def client_row(name: str | None, sent_us: int, ttft_us: int = 100, e2e_us: int = 1000) -> dict[str, object]:
    return {"request_id": name, "sent_us": sent_us, "ttft_us": ttft_us, "e2e_us": e2e_us, "status": "ok"}


def server_row(name: str, sent_us: int, ttft_us: int = 80, e2e_us: int = 950) -> dict[str, object]:
    return {"request_id": name, "sent_us": sent_us, "ttft_us": ttft_us, "e2e_us": e2e_us, "queue_us": 7, "status": "ok"}


def test_bounds_by_hand() -> None:
    """Server 1,000,000 us ahead; it has the first request 10 us after its send, its first token 10 us early.

    Sends: at most 1,000,010 and 1,000,030.  First tokens: at least 1,000,010 + 80 - 100 = 999,990, and of
    the second 1,000,030 + 60 - 100 = 999,990.
    """
    client = read_frame([client_row("a", 0), client_row("b", 500)])
    server = read_frame([server_row("cmpl-b-0", 1_000_530, 60, 960), server_row("cmpl-a-0", 1_000_010)])
    pairing = paired(client, server, "epoch")
    joined, alignment = pairing.frame, pairing.alignment
    assert (pairing.how, pairing.client_rows.tolist()) == (BY_IDS, [1, 0])
    assert alignment == Alignment(999_990, 1_000_010, 2, "epoch")
    assert (alignment.offset_us(None), alignment.uncertainty_us(1_000_000), alignment.crossed) == (1_000_000, 10, False)
    assert (alignment.offset_us(999_999), alignment.uncertainty_us(999_999)) == (999_999, 11), "as stamped, and allowed"
    assert alignment.offset_us(0) == 1_000_000, "as stamped, and contradicted"
    assert joined["queue_us"].to_list() == [7, 7]
    assert joined["sent_us"].to_list() == [0, 500]


@pytest.mark.parametrize(
    ("client_id", "server_id"),
    [
        ("r-1", "r-1"),
        ("r-1", "cmpl-r-1"),
        ("r-1", "chatcmpl-r-1"),
        ("r-1", "cmpl-r-1-0-0f0f0f0f"),
        ("cmpl-95322c", "cmpl-95322c-0"),
        ("5b8e2a-11", "cmpl-5b8e2a-11-0"),
    ],
)
def test_ids_are_matched_through_what_the_server_adds(client_id: str, server_id: str) -> None:
    client = read_frame([client_row(client_id, 0), client_row("other", 1)])
    server = read_frame([server_row(server_id, 0), server_row("other", 1)])
    alignment = paired(client, server, "epoch").alignment
    assert alignment is not None
    assert alignment.pairs == 2


def test_ids_that_occur_twice_and_single_pairs_tell_nothing() -> None:
    client = read_frame([client_row("a", 0), client_row("a", 1), client_row("b", 2), client_row(None, 3)])
    server = read_frame([server_row("a", 0), server_row("b", 2)])
    pairing = paired(client, server, "epoch")
    assert (pairing.alignment, pairing.how) == (None, "")
    assert pairing.frame.equals(client)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    offset_us=st.integers(-(10**12), 10**12),
    requests=st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 9000), st.integers(1, 10**6), st.integers(0, 9000)),
        min_size=2,
        max_size=30,
        unique_by=lambda row: row[0],
    ),
)
def test_a_planted_offset_lies_within_the_bounds(offset_us: int, requests: list[tuple[int, int, int, int]]) -> None:
    """Whatever the delays on the way there and back are, as long as nothing arrives before it was sent."""
    client = read_frame(client_row(str(i), s, d + e // 2 + b, d + e + b) for i, (s, d, e, b) in enumerate(requests))
    server = read_frame(server_row(str(i), s + d + offset_us, e // 2, e) for i, (s, d, e, _b) in enumerate(requests))
    alignment = paired(client, server, "monotonic").alignment
    assert alignment is not None
    assert alignment.low_us <= offset_us <= alignment.high_us
    estimate_us = alignment.offset_us(None)
    assert abs(estimate_us - offset_us) <= alignment.uncertainty_us(estimate_us)


def test_a_clock_that_drifts_makes_the_bounds_cross() -> None:
    """1 % fast over 100 s: the first pair says 0 to 100 us, the last 1,000,000 us."""
    client = read_frame(client_row(str(i), i * 10_000_000) for i in range(11))
    server = read_frame(server_row(str(i), i * 10_100_000 + 20) for i in range(11))
    alignment = paired(client, server, "epoch").alignment
    assert alignment is not None
    assert alignment.crossed


def lengths_row(sent_us: int, prompt: int, output: int, name: str | None = None) -> dict[str, object]:
    ttft_us = 100 if name is None else 80
    return {
        "request_id": name,
        "sent_us": sent_us,
        "prompt_tokens": prompt,
        "output_tokens_reported": output,
        "ttft_us": ttft_us,
        "status": "ok",
        "queue_us": None if name is None else 7,
    }


def numbered(number: int) -> str:
    return f"cmpl-bench-17307ea6-{number}-0"


def test_the_numbers_in_the_ids_of_vllms_benchmark_count_the_requests_of_its_result() -> None:
    """Its result has no ids.  Requests 0 to 2, which the server had in the order 2, 0, 1, after a warm-up."""
    client = read_frame(lengths_row(i * 1000, 100 + i, 30) for i in range(3))
    names = ["cmpl-8584b47395338c03-0", numbered(2), numbered(0), numbered(1)]
    prompts = [100, 102, 100, 101]
    server = read_frame(lengths_row(50 + i, prompts[i], 30, names[i]) for i in range(4))
    pairing = paired(client, server, "epoch")
    assert (pairing.how, pairing.client_rows.tolist()) == (BY_NUMBERS, [-1, 2, 0, 1])


@pytest.mark.parametrize("ids", [("a", "b", "c"), ("c", "b", "a"), ("z", "m", "a")])
def test_each_run_of_the_benchmark_numbers_its_requests_anew(ids: tuple[str, str, str]) -> None:
    """Three runs of one seed, 100 s apart; the first was not kept.

    Files are in the order of names, the last run first.  The server's clock is 7 s ahead.  Taking each file for the run
    before would fit as well, with 107 s.
    """
    sent_us, ahead_us = (0, 100_000_000, 200_000_000), 7_000_000
    runs = [[lengths_row(at_us + i * 1_000_000, 100 + i, 30) for i in range(5)] for at_us in sent_us]
    client = read_frame([*runs[2], *runs[1]])
    server = read_frame(
        lengths_row(at_us + ahead_us + i * 1_000_000 + 900, 100 + i, 30, f"cmpl-bench-{run}-{i}-0")
        for run, at_us in zip(ids, sent_us, strict=True)
        for i in range(5)
    )
    files = np.repeat(["a.json", "b.json"], 5)
    pairing = paired(client, server, "epoch", files=files, alike=True)
    assert (pairing.how, pairing.client_rows.tolist()) == (BY_NUMBERS, [*[-1] * 5, *range(5, 10), *range(5)])
    assert paired(client, server, "epoch", files=files).how != BY_NUMBERS, "clocks that may be 107 s apart"


def test_numbers_whose_prompts_do_not_agree_tell_nothing() -> None:
    """The client's first request was left out of its file, so that every number is one too high."""
    client = read_frame(lengths_row(i * 1000, 100 + (i + 1) ** 2, 30) for i in range(9))
    server = read_frame(lengths_row(10**9 - i * 5_000_000, 100 + i**2, 30, numbered(i)) for i in range(10))
    assert paired(client, server, "epoch").how == ""


def test_lengths_and_arrivals_tell_where_ids_do_not() -> None:
    """40 requests of random lengths, sent over 8 s; the server's clock is 1,000 s ahead, its requests 2 to 20 ms later.

    Before them it had two warm-ups of the lengths of the first.
    """
    rng = np.random.default_rng(3)
    sent_us = np.sort(rng.integers(0, 8_000_000, 40)).tolist()
    lengths = rng.integers(10, 200, (40, 2)).tolist()
    client = read_frame(lengths_row(t, *lengths[i]) for i, t in enumerate(sent_us))
    warm = [lengths_row(1_000_000_000 - us, *lengths[0], name="w") for us in (900_000, 500_000)]
    late_us = rng.integers(2_000, 20_000, 40).tolist()
    own = [lengths_row(10**9 + t + late_us[i], *lengths[i], name="x") for i, t in enumerate(sent_us)]
    pairing = paired(client, read_frame([*warm, *own]), "epoch")
    assert (pairing.how, pairing.client_rows.tolist()) == (BY_CONTENT, [-1, -1, *range(40)])


@pytest.mark.parametrize(("one_clock", "ahead_us", "how"), [(True, 0, BY_CLOCK), (False, 10**9, BY_CONTENT)])
def test_requests_that_the_server_had_not_ended_are_told_by_what_is_left(
    one_clock: bool, ahead_us: int, how: str
) -> None:
    """Of 60 requests the record of the server ends before the last token of three, as where its engine was killed.

    Their output length is not known there.  A warm-up before the run stays nobody's.
    """
    rng = np.random.default_rng(4)
    sent_us, lengths = np.sort(rng.integers(0, 9_000_000, 60)).tolist(), rng.integers(10, 200, (60, 2)).tolist()
    client = read_frame(lengths_row(t, *lengths[i]) for i, t in enumerate(sent_us))
    own = [lengths_row(ahead_us + t + 3_000, *lengths[i], name="x") for i, t in enumerate(sent_us)]
    for row in own[-3:]:
        row |= {"status": "error", "output_tokens_reported": 2}
    warm = lengths_row(ahead_us - 500_000, *lengths[0], name="w")
    pairing = paired(client, read_frame([warm, *own]), "monotonic", one_clock)
    assert (pairing.how, pairing.client_rows.tolist()) == (how, [-1, *range(60)])


def test_equal_requests_at_equal_distances_could_be_any_of_them() -> None:
    """One every second, all of one length, and three more on the server: four offsets fit."""
    client = read_frame(lengths_row(i * 1_000_000, 100, 30) for i in range(20))
    server = read_frame(lengths_row(5 + i * 1_000_000, 100, 30, "x") for i in range(23))
    assert paired(client, server, "epoch").how == ""


def test_vllms_benchmark_and_the_spans_of_vllm_0_32(data_pack: Path, tmp_path: Path) -> None:
    """300 requests of the client; the server had three warm-ups before them, which are kept beside them."""
    with read_recording(data_pack / "live-vllm-0.32" / "A") as recording:
        assert recording.requests["queue_us"].count() == 300
        traced = recording.lifecycles.frame()
        assert traced["request_index"].to_list() == [None] * 3 + list(range(300))
        assert traced["prompt_tokens"].to_list()[3:] == recording.requests["prompt_tokens"].to_list()
        (server,) = [clock for clock in recording.clocks if clock.name == "server"]
        assert (server.kind, server.placed, server.uncertainty_us) == ("epoch", "bridged by identities", 1079)
        (others,) = [line for line in recording.missing if "Load model" in line]
        assert others.startswith("11 spans that are not steps or requests (")


def test_guidellm_and_the_spans_of_a_real_server(data_pack: Path) -> None:
    """200 requests of the client, 197 spans; both clocks are of the epoch and agree to -1.6 to 4.9 ms."""
    folder = data_pack / "blis-eval" / "jan20-prefill-llama7b-tp1-1"
    with read_recording(folder) as recording:
        assert recording.requests["queue_us"].count() == 197
        (server,) = [clock for clock in recording.clocks if clock.name == "server"]
        client = recording.clocks[0]
        assert (server.placed, server.kind, client.name) == ("bridged by identities", "epoch", "client")
        assert server.zero_us == client.zero_us, "the bounds allow one clock"
        assert server.uncertainty_us == 4859
        queued = recording.requests.frame().filter(pl.col("queue_us").is_not_null())
        assert (queued["queue_us"] + queued["prefill_us"] <= queued["ttft_us"] + 7000).all()
