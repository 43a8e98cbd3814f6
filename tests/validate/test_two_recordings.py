"""Two recordings of servers: is B worse by more than a bound, and what of it is pace, arguments, load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from command_line import Run
from gating_cases import FILES, SMALL, release
from scipy import stats

from blis_replay.base.errors import NothingToJudgeError, UnknownNameError
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.recording import Clock, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import Store, open_store, read_stored
from blis_replay.validate.comparison.bounds import parse_bound
from blis_replay.validate.comparison.changes import change_of_runs
from blis_replay.validate.comparison.differences import Differences, differences, differences_answer
from blis_replay.validate.comparison.named_sides import Choice, sides_of
from blis_replay.validate.comparison.repeats import refuse_copies
from blis_replay.validate.comparison.sides import recording_side
from blis_replay.validate.explain.between import LOAD, OTHERS, Why, why_different
from blis_replay.validate.explain.parts import PACE_OF_STEPS
from blis_replay.validate.metrics.uncertainty import ASSUMED_RUN_NOISE, RUNS_APART, Estimate
from blis_replay_labs.planted.files import write_experiment
from blis_replay_labs.planted.generate import generate

# The same requests with every step 20 % longer, and with a limit of 4 sequences.
SLOW = replace(
    SMALL, slug="20260302-120000-slow-1b-tp1-general", latency=LatencyModel("blackbox", 9_600_000, 36_000, 72_000)
)
NARROW = replace(SMALL, slug="20260304-120000-narrow-1b-tp1-general", engine=replace(SMALL.engine, max_num_seqs=4))
_E2E = ("e2e", "mean")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("two")
    for spec in (SMALL, SLOW, NARROW):
        write_experiment(generate(spec), folder / spec.slug, files=(*FILES, "traces.json.gz"))
        seqs = spec.engine.max_num_seqs
        (folder / "engine.yaml").write_text(f"async_scheduling: true\nnum_gpu_blocks: 10001\nmax_num_seqs: {seqs}\n")
        ingest_source(folder / "s.duckdb", folder / spec.slug, engine_file=folder / "engine.yaml")
    with open_store(folder / "s.duckdb") as opened:
        yield opened


def compared(store: Store, a: str, b: str) -> Differences:
    (one, *more), (other, *others) = (sides_of(store, name, Choice(None)) for name in (a, b))
    return differences(one, other, (more, others))


def why(store: Store, b: str) -> Why:
    sides = [sides_of(store, name, Choice(None))[0].recording for name in (SMALL.slug, b)]
    change = compared(store, SMALL.slug, b).changes[_E2E].error
    return why_different(sides[0], sides[1], release("true"), {_E2E: change})


@pytest.mark.slow
def test_a_server_whose_steps_take_20_percent_longer(store: Store) -> None:
    """E2E is steps but for 5.4 ms, so it is 18 to 25 % longer; run-to-run noise is most of the interval."""
    found = compared(store, SMALL.slug, SLOW.slug)
    change = found.changes[_E2E]
    assert 0.18 < change.error < 0.25
    assert change.parts["requests"] < 0.025 < change.parts["assumed"]
    assert differences_answer(found).document["assumed_run_noise"] == pytest.approx(ASSUMED_RUN_NOISE)
    codes = [differences_answer(found, [parse_bound(f"e2e={limit}")]).exit_code for limit in ("+15%", "+30%", "-5%")]
    assert codes == [1, 0, 0]
    (explained,) = why(store, SLOW.slug).found
    assert explained.cause == PACE_OF_STEPS
    assert explained.shares[PACE_OF_STEPS] == pytest.approx(change.error, abs=0.02)
    assert abs(explained.left) < 0.02


@pytest.mark.slow
def test_a_server_that_runs_fewer_requests_at_once(store: Store) -> None:
    explanation = why(store, NARROW.slug)
    (explained,) = explanation.found
    assert (explained.cause, explanation.what[OTHERS]) == (OTHERS, f"max_num_seqs {SMALL.engine.max_num_seqs:,} and 4")
    assert 0.05 < explained.shares[OTHERS] < explained.change
    assert abs(explained.left) < 0.01
    assert abs(explained.shares[LOAD]) < 0.01


@pytest.mark.slow
def test_a_recording_beside_itself_is_no_worse(store: Store) -> None:
    answer = differences_answer(compared(store, SMALL.slug, SMALL.slug), [parse_bound("p99.ttft=0.01%")])
    assert (answer.exit_code, answer.document["bounds"][0]["verdict"]) == (0, "PASS")


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False], ids=["the same requests", "others"])
@pytest.mark.parametrize(("late", "code"), [(slice(60, 72), 3), (slice(None), 1)], ids=["one stall", "every request"])
def test_one_stall_is_no_regression(store: Store, late: slice, code: int, paired: bool) -> None:
    """Twelve requests in a row that wait for 20 s raise the mean beyond +5 %, once; 20 % of each do so always."""
    (side,) = sides_of(store, SMALL.slug, Choice(None))
    latencies = {name: side.recording.requests[name].to_numpy().astype(np.float64) for name in ("ttft_us", "e2e_us")}
    for latency_us in latencies.values():
        latency_us[late] += 20e6 if code == 3 else 0.2 * latency_us[late]
    changed = side.recording.requests.frame().with_columns(
        **{name: pl.Series(of.astype(np.int64)) for name, of in latencies.items()}
    )
    changed = changed if paired else changed[:-3]
    again = replace(side.recording, requests=rows_of(changed), content_hash="again")
    found = differences(side, recording_side(again, None))
    assert found.changes[_E2E].error > 0.05
    assert differences_answer(found, [parse_bound("e2e=+5%")]).exit_code == code


@pytest.mark.slow
@pytest.mark.parametrize(("failed", "paired"), [(0, True), (1, True), (19, True), (21, False)])
def test_requests_that_failed_on_one_server_leave_the_others_in_pairs(store: Store, failed: int, paired: bool) -> None:
    """One of 220 requests was lost, and the interval of a change of 9 s was 28 s wide, not 13.

    Nine of ten have to be there.
    """
    (side,) = sides_of(store, SMALL.slug, Choice(None))
    lost = pl.int_range(pl.len()) < failed
    rows = side.recording.requests.frame().with_columns(
        pl.when(lost).then(None).otherwise("output_tokens").alias("output_tokens"),
        pl.when(lost).then(None).otherwise("ttft_us").alias("ttft_us"),
        pl.when(lost).then(pl.lit("error")).otherwise("status").alias("status"),
    )
    again = replace(side.recording, requests=rows_of(rows), content_hash="again")
    found = differences(side, recording_side(again, None))
    assert ("of the same requests" in found.resampled) == paired


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (pl.col("prompt_tokens") + pl.int_range(pl.len()) % 3, 0),
        ((pl.col("prompt_tokens") * 1.5).cast(pl.Int64), 4),
        ((pl.col("output_tokens") * 1.5).cast(pl.Int64), 4),
        ((pl.col("arrival_us") * 0.5).cast(pl.Int64), 4),
    ],
    ids=["one token more", "longer prompts", "longer outputs", "twice the rate"],
)
def test_other_loads_are_no_measure_of_a_server(store: Store, change: pl.Expr, code: int) -> None:
    """The same latencies: E2E of half as long outputs is no regression of anything, nor its absence."""
    (side,) = sides_of(store, SMALL.slug, Choice(None))
    requests = side.recording.requests.frame().with_columns(change)[:-3]
    found = differences(
        side, recording_side(replace(side.recording, requests=rows_of(requests), content_hash="b"), None)
    )
    assert differences_answer(found, [parse_bound("e2e=+15%")]).exit_code == code
    assert bool(found.other_load) == (code == 4)
    page = str(differences_answer(found, [])).split("\n\n")[0]
    assert ("another load" in page) == (code == 4), "without a bound too"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (pl.col("arrival_us") + 1_000 * (pl.int_range(pl.len()) % 2), 0),
        ((pl.col("arrival_us") * 0.9).cast(pl.Int64), 4),
        (pl.col("arrival_us").gather(pl.int_range(pl.len()) // 10 * 10), 4),
    ],
    ids=["a millisecond later", "a tenth faster", "in bursts of ten"],
)
def test_the_same_requests_at_other_times_are_no_measure_of_a_server(store: Store, change: pl.Expr, code: int) -> None:
    """All lengths and latencies are equal, so only the sends tell that another load was served."""
    (side,) = sides_of(store, SMALL.slug, Choice(None))
    requests = side.recording.requests.frame().with_columns(change)
    other = replace(side.recording, requests=rows_of(requests), content_hash="b")
    found = differences(side, recording_side(other, None))
    assert differences_answer(found, [parse_bound("e2e=+15%")]).exit_code == code


@pytest.mark.slow
def test_a_copy_is_no_further_run_of_a_side(store: Store) -> None:
    """It would say that runs of this server do not differ at all."""
    requests, slow = (replace(read_stored(store, of.slug), clocks=(), files=()) for of in (SMALL, SLOW))
    assert refused_copy(requests, replace(requests, slug="copied", content_hash="c"))
    rounded = requests.requests.frame().with_columns(pl.col("ttft_us", "e2e_us") // 1000 * 1000)[20:]
    assert refused_copy(requests, replace(requests, slug="rounded", requests=rows_of(rounded)))
    assert not refused_copy(requests, slow)
    # Equal requests on a calm server: many have a latency that one of the other run has too, but not in its place.
    random = np.random.default_rng(4)
    alike = [
        requests.requests.frame().with_columns(
            prompt_tokens=pl.lit(512),
            ttft_us=pl.Series(random.normal(15_000, 300, requests.requests.height).astype(int)),
            e2e_us=pl.Series(random.normal(900_000, 2_000, requests.requests.height).astype(int)),
        )
        for _ in range(2)
    ]
    one, again = (replace(requests, slug=str(i), requests=rows_of(frame)) for i, frame in enumerate(alike))
    assert not refused_copy(one, again)


@pytest.mark.slow
@pytest.mark.parametrize(("later_s", "refused"), [(0, True), (86_400, False)])
def test_the_same_run_by_another_instrument_is_no_further_run(store: Store, later_s: int, refused: bool) -> None:
    """A gateway stamps every request 2 ms nearer to the server, so no latency is equal; the times of day are."""
    requests = read_stored(store, SMALL.slug)
    nearer = requests.requests.frame().with_columns(pl.col("ttft_us", "e2e_us") - 2_000)
    by_client, by_gateway = (
        replace(one, clocks=(Clock("client", "epoch", 1_700_000_000_000_000 + after_us),))
        for one, after_us in (
            (requests, 0),
            (replace(requests, slug="gateway", requests=rows_of(nearer)), 2_000 + later_s * 1_000_000),
        )
    )
    assert refused_copy(by_client, by_gateway) == refused


def refused_copy(one: Recording, other: Recording) -> bool:
    try:
        refuse_copies(other, [one])
    except NothingToJudgeError:
        return True
    return False


@pytest.mark.slow
def test_several_recordings_of_a_side(store: Store) -> None:
    """Two of A that differ by 20 % leave open whether B, like the first of them, is 5 % worse."""
    found = compared(store, f"{SMALL.slug},{SLOW.slug}", SMALL.slug)
    assert found.runs == (2, 1)
    assert differences_answer(found, [parse_bound("e2e=+5%")]).exit_code == 3


@pytest.mark.slow
def test_other_models_are_not_explained(store: Store) -> None:
    (side,) = sides_of(store, SMALL.slug, Choice(None))
    other = replace(side.recording, model="another/model")
    with pytest.raises(NothingToJudgeError, match="another/model"):
        why_different(side.recording, other, release("true"), {_E2E: 0.1})


def test_the_interval_of_runs_is_that_of_a_t_test() -> None:
    """Runs that differ by far more than requests explain: Student's t, relative to each mean.

    The variance of the six runs has four degrees of freedom, and the assumed noise of runs is a fifth.
    """
    a, b = [100.0, 108.0, 97.0], [115.0, 122.0, 110.0]
    once = Estimate(0.15, 0.1499, 0.1501, 12, {"requests": 0.0001})
    found = change_of_runs(once, a, b, RUNS_APART)
    relative = [np.array(side) / np.mean(side) for side in (a, b)]
    pooled = (np.var(relative[0], ddof=1) + np.var(relative[1], ddof=1)) / 2
    assert pooled > ASSUMED_RUN_NOISE**2
    half = stats.t(5).ppf(0.975) * np.sqrt(pooled * (1 / 3 + 1 / 3))
    assert found.error == pytest.approx(np.mean(b) / np.mean(a) - 1)
    assert found.half == pytest.approx(half * np.mean(b) / np.mean(a), rel=1e-4)


def test_one_run_a_side_has_the_noise_that_is_assumed() -> None:
    once = Estimate(0.15, 0.11, 0.19, 12, {"requests": 0.04})
    assert change_of_runs(once, [100.0], [115.0], 0.0) is once
    found = change_of_runs(once, [100.0], [115.0], 0.03 / 1.15)
    assert (found.low, found.high) == pytest.approx((0.10, 0.20))
    assert found.parts == pytest.approx({"requests": 0.04, "assumed": 0.03})


@pytest.mark.parametrize(
    ("text", "cell", "low", "high"),
    [
        ("p99.ttft=+5%", ("ttft", "p99"), -np.inf, 0.05),
        ("ttft.p99=+5%", ("ttft", "p99"), -np.inf, 0.05),
        ("e2e=2.5%", ("e2e", "mean"), -0.025, 0.025),
        ("mean.itl=-1%", ("itl", "mean"), -0.01, np.inf),
    ],
)
def test_a_bound_is_read(text: str, cell: tuple[str, str], low: float, high: float) -> None:
    bound = parse_bound(text)
    assert (bound.cell, bound.low, bound.high) == (cell, low, high)


@pytest.mark.parametrize(
    "text", ["", "ttft", "p99=+5%", "ttft=5", "ttft=+5 ms", "p98.ttft=5%", "p99.itl=5%", "e2e=++1"]
)
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(UnknownNameError):
        parse_bound(text)


def test_bounds_need_two_sides_or_a_history(run: Run) -> None:
    assert run("compare", "--published", "--fail-if", "e2e=+5%").code == 2
    assert run("compare", "a", "b", "--fail-if", "e2e").code == 2


@pytest.mark.heavy
def test_real_servers_differ_by_what_their_records_say(run: Run, data_pack: Path) -> None:
    """The README of these recordings: `again` has steps 1.15 times as long, the other runs two requests at once."""
    folder = data_pack / "live-vllm-0.29"
    for name in ("q8c", "again", "max-num-seqs-2"):
        columns = "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms"
        assert run("ingest", folder / name, "--columns", columns, "--name", name, "-q").code == 0
    causes = {}
    for name in ("again", "max-num-seqs-2"):
        asked = ("--explain",) if name == "again" else ()  # who names coefficients asks as well
        options = ("--json", "--coefficients", folder / "q8c-coefficients.yaml", *asked)
        found = run("compare", "q8c", name, *options).json["why"]
        causes[name] = next(one["cause"] for one in found if (one["metric"], one["statistic"]) == _E2E)
    assert causes == {"again": PACE_OF_STEPS, "max-num-seqs-2": OTHERS}
