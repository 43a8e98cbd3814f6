"""What a release was fitted on is known by content: a copy, a part, another run of the same load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn, RunMark, format_release, parse_release
from blis_replay.fixtures.catalogue import RECORDED_FOLDER
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.identity import request_keys, shared_with, sketch_of
from blis_replay.ingest.recording import NOT_KNOWN, Clock, Recording, SourceFile
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.held_out import use_of
from blis_replay.validate.judgement import FITTED
from blis_replay.validate.run_mark import run_mark


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Recording, Recording]]:
    """Two runs of one load on one server; the release that ships was fitted on the first."""
    with read_recording(RECORDED_FOLDER / "tiny-live-a") as a, read_recording(RECORDED_FOLDER / "tiny-live-a2") as a2:
        yield a, a2


def renamed(recording: Recording, requests: pl.DataFrame) -> Recording:
    """Other requests under another name and hash, as whoever cut them out of a file would ingest them."""
    return replace(recording, slug="other", content_hash="0" * 64, requests=rows_of(requests))


@pytest.fixture(params=["stated", "bundled"])
def release(request: pytest.FixtureRequest, runs: tuple[Recording, Recording]) -> CoefficientRelease:
    """With a sketch of its own, and as those that were made before there were any."""
    shipped = load_release("cpu-vllm-0.32.0")
    fits = (FittedOn("a", "0", "latencies", None, sketch_of(runs[0])),)
    return replace(shipped, fitted_on=fits) if request.param == "stated" else shipped


@pytest.mark.slow
def test_a_copy_without_its_end_and_a_slice_are_not_held_out(
    release: CoefficientRelease, runs: tuple[Recording, Recording]
) -> None:
    requests = runs[0].requests.frame()
    parts = (requests, requests[:-20], requests[100:130])
    assert {use_of(release, renamed(runs[0], part)) for part in parts} == {"fitted on this run"}


@pytest.mark.slow
def test_a_copy_with_other_numbers_is_not_held_out(
    release: CoefficientRelease, runs: tuple[Recording, Recording]
) -> None:
    """Every third request; latencies in whole ms, rounded or cut; a prompt counted with BOS; all of these at once."""
    requests = runs[0].requests.frame()
    latencies = pl.col("ttft_us", "e2e_us")
    rounded = requests.with_columns((latencies / 1000).round().cast(pl.Int64) * 1000)
    copies = (
        requests.gather_every(3),
        rounded,
        requests.with_columns(latencies // 1000 * 1000),
        requests.with_columns(pl.col("prompt_tokens") + 1),
        rounded.with_columns(pl.col("prompt_tokens") + 1),
    )
    uses = [use_of(release, renamed(runs[0], copy)) for copy in copies]
    assert set(uses) <= {*FITTED}, uses


@pytest.mark.slow
def test_another_run_of_the_same_load_is_held_out(
    release: CoefficientRelease, runs: tuple[Recording, Recording]
) -> None:
    assert use_of(release, runs[1]) == "held out"


@pytest.mark.slow
def test_a_recording_of_which_some_requests_were_fitted_on_is_fitted_on_in_part(
    release: CoefficientRelease, runs: tuple[Recording, Recording]
) -> None:
    fitted, other = (run.requests.frame() for run in runs)
    mixed = pl.concat([fitted[:20], other[20:]])
    assert use_of(release, renamed(runs[1], mixed)) == "fitted on part of this run"


EPOCH = Clock("client", "epoch", 1_790_000_000_000_000)


@pytest.mark.parametrize(
    ("model", "runs_after", "use"),
    [
        ("m", 0.0, "fitted on another side of this run"),
        (None, 0.0, "fitted on another side of this run"),
        ("m", 0.5, "fitted on another side of this run"),
        ("m", 1.0, "held out"),
        ("another", 0.0, "held out"),
    ],
)
def test_another_side_of_the_same_run_is_known_by_its_time(
    runs: tuple[Recording, Recording], model: str | None, runs_after: float, use: str
) -> None:
    """A client's file, judged by a fit to the counters of its server, which have none of its latencies.

    ``runs_after``: how many times the length of the run the fit began later.
    """
    seen = replace(runs[1], model="m", clocks=(EPOCH,))
    first_us, last_us = run_mark(seen).sent_us or (0, 0)
    assert (first_us, last_us - first_us) == (EPOCH.zero_us, seen.requests["arrival_us"].max())
    later = round(runs_after * (last_us - first_us))
    mark = RunMark(7, model, (first_us + later, last_us + later))
    assert use_of(marked(mark), renamed(seen, seen.requests.frame())) == use


def marked(mark: RunMark) -> CoefficientRelease:
    """A release that was fitted on another recording of that mark."""
    return replace(load_release("cpu-vllm-0.32.0"), fitted_on=(FittedOn("counters", "0", "latencies", run=mark),))


@pytest.mark.parametrize(
    ("requests", "kind", "use"),
    [
        (240, "server log", "fitted on another side of this run"),
        (243, "otlp", "fitted on another side of this run"),  # with its warm-up
        (120, "server log", "held out"),  # another load in the same log
        (240, "experiment configuration", "held out"),
    ],
)
def test_another_side_of_the_same_run_is_known_by_what_its_server_wrote(
    runs: tuple[Recording, Recording], requests: int, kind: str, use: str
) -> None:
    """``vllm bench`` writes no time of the day for its 240 requests; spans of that run are beside the same log."""
    file = SourceFile("vllm.log.gz", kind, 1, "ab" * 32)
    seen = replace(runs[1], clocks=(replace(EPOCH, kind="monotonic"),), files=(file,))
    release = marked(replace(run_mark(seen), requests=requests, server_files=("cd" * 32, "ab" * 32)))
    assert use_of(release, renamed(seen, seen.requests.frame())) == use


def test_two_loads_of_as_many_requests_in_one_log_are_told_apart_by_their_clocks(
    runs: tuple[Recording, Recording],
) -> None:
    """Levels of a sweep: 240 requests each, one after the other, beside the log of all."""
    seen = replace(runs[1], clocks=(EPOCH,), files=(SourceFile("vllm.log.gz", "server log", 1, "ab" * 32),))
    first_us, last_us = run_mark(seen).sent_us or (0, 0)
    before = replace(run_mark(seen), sent_us=(first_us - 400_000_000, last_us - 400_000_000))
    assert use_of(marked(before), renamed(seen, seen.requests.frame())) == "held out"


def test_the_clock_of_any_side_places_a_run(runs: tuple[Recording, Recording]) -> None:
    monotonic, server = replace(EPOCH, kind="monotonic"), replace(EPOCH, name="server")
    mark = run_mark(replace(runs[0], clocks=(monotonic, server)))
    assert mark.sent_us is not None and mark.sent_us[0] == EPOCH.zero_us
    assert run_mark(replace(runs[0], clocks=(monotonic, replace(server, placed=NOT_KNOWN)))).sent_us is None


def test_a_made_up_clock_places_no_run(runs: tuple[Recording, Recording]) -> None:
    clocks = replace(EPOCH, constructed=True), replace(EPOCH, kind="relative")
    assert [run_mark(replace(runs[0], clocks=(clock,))).sent_us for clock in clocks] == [None, None]


def test_latencies_that_were_written_in_tenths_of_milliseconds_are_the_same(runs: tuple[Recording, Recording]) -> None:
    requests = runs[0].requests.frame()
    rounded = requests.with_columns((pl.col("ttft_us", "e2e_us") / 100).round() * 100)
    sketch = sketch_of(runs[0])
    assert sketch is not None
    # Of a whole run; what is rounded twice, to tenths and to whole ms, ends on another ms now and then.
    assert shared_with(sketch, request_keys(renamed(runs[0], rounded))) > 0.9


def test_a_sketch_is_kept_with_a_release_and_read_strictly(runs: tuple[Recording, Recording]) -> None:
    mark = RunMark(240, "m", (1, 2), ("ab" * 32,))
    fits = (FittedOn("a", "0", "latencies", None, sketch_of(runs[0]), run=mark), FittedOn("b", "1", "steps"))
    made = replace(load_release("cpu-vllm-0.32.0"), fitted_on=fits)
    text = format_release(made)
    assert parse_release(text, "x").fitted_on == fits
    with pytest.raises(ReleaseError, match="sketch"):
        parse_release(text.replace("sketch: ", "sketch: '!'  #"), "x")


@pytest.mark.slow
def test_34b_general_without_its_last_100_of_16800_requests_was_fitted_on(data_pack: Path) -> None:
    with read_recording(data_pack / "h100" / "20260218-150304-codellama-34b-tp2-general") as recording:
        requests = recording.requests.frame()
        for release in ("h100-vllm-0.15.1", "h100-physical"):
            assert use_of(load_release(release), renamed(recording, requests[:-100])) == "fitted on this run"
