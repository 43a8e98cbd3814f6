"""What a difference between schedules means: each cause is planted, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from logged import ENGINE, logged, served, workload
from test_schedule_checksum import PRESSED, stepwise

from blis_replay.blis.trace import release_arguments
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place
from blis_replay.replay.schedule.checksum import check_schedule
from blis_replay.replay.schedule.recorded import recorded_schedule
from blis_replay.validate.explain.inputs import argument_hypothesis
from blis_replay.validate.explain.schedule import (
    ABORTED,
    ARGUMENT,
    NOT_IDENTIFIED,
    PREFIX,
    VERSION,
    Meaning,
    blocks_that_fit,
    meaning_of,
)

BUSY: dict[str, Any] = {"rate_per_s": 20.0}


def recorded(load: dict[str, Any] = BUSY, **engine: Any) -> Recording:
    """The log of an engine with these arguments, its iterations placed."""
    made = logged(workload(4, **load), replace(ENGINE, **engine))
    return replace(made, iterations=place(made, Scratch()).iterations)


def meaning(recording: Recording, **engine: Any) -> Meaning | None:
    return meaning_of(recording, check_schedule(recorded_schedule(recording), replace(ENGINE, **engine)))


def test_an_equal_schedule_means_nothing() -> None:
    assert meaning(recorded()) is None


@pytest.mark.parametrize(
    ("server", "assumed", "argument", "value"),
    [
        ({"max_num_seqs": 4}, {}, "max_num_seqs", 4),
        ({"max_num_batched_tokens": 700}, {}, "max_num_batched_tokens", 700),
        ({"num_gpu_blocks": 600}, {}, "num_gpu_blocks", None),
        ({}, {"async_scheduling": True}, "async_scheduling", False),
        ({"async_scheduling": True}, {}, "async_scheduling", True),
    ],
)
def test_a_wrong_engine_argument_is_named_with_the_right_one(
    server: dict[str, Any], assumed: dict[str, Any], argument: str, value: int | None
) -> None:
    found = meaning(recorded(**server), **assumed)
    assert found is not None
    assert (found.cause, found.argument[0]) == (ARGUMENT, argument)
    assert value in (None, found.argument[1])
    assert found.reached == found.steps


def test_a_limit_that_was_never_reached_is_that_or_more() -> None:
    """Of 32 at once the load takes fewer, and more than the 4 that are assumed."""
    found = meaning(recorded(), max_num_seqs=4)
    assert found is not None
    name, value = found.argument
    assert name == "max_num_seqs"
    assert 4 < int(value or 0) < 32
    assert found.hypothesis.remedy == argument_hypothesis("max_num_seqs", int(value or 0), 4, at_least=True).remedy


def test_a_threshold_of_long_prefills_is_named_where_they_come_one_by_one() -> None:
    found = meaning(recorded({"rate_per_s": 1.5, "requests": 20}, long_prefill_token_threshold=300))
    assert found is not None
    assert found.argument == ("long_prefill_token_threshold", 300)


def test_the_number_of_blocks_is_worked_out_from_the_usage() -> None:
    """600 blocks, and never a lack of them: the log's usage is exact to a thousandth of them."""
    recording = recorded({"rate_per_s": 5.0}, num_gpu_blocks=600)
    found = meaning(recording)
    assert found is not None
    assert found.argument[1] == pytest.approx(600, abs=5)
    check = check_schedule(recorded_schedule(recording), replace(ENGINE, num_gpu_blocks=None))
    assert check.whole
    assert blocks_that_fit(check) == pytest.approx(600, abs=5)


def test_a_prefix_cache_that_counts_as_off_and_has_hits() -> None:
    recording = recorded()
    off = replace(recording, engine=recording.engine | {"enable_prefix_caching": Setting(False, "file")})
    found = meaning(off, enable_prefix_caching=False)
    assert found is not None
    assert found.cause == PREFIX
    assert "counts as switched off" in found.sentence


def test_prefix_hits_that_are_recorded_and_did_not_happen() -> None:
    recording = recorded()
    hits = recording.requests.frame().with_columns(pl.lit(16).alias("cached_prompt_tokens"))
    found = meaning(replace(recording, requests=rows_of(hits)))
    assert found is not None
    assert (found.cause, found.sentence) == (PREFIX, "the prefix hits that are recorded are not those of the steps")


def test_a_request_that_ended_early() -> None:
    """Request 7 ended at the server with the tokens it had; the client's file says 30 more."""
    recording = recorded()
    more = 30 * (pl.col("request_index") == 7).cast(pl.Int64)
    longer = recording.requests.frame().with_columns(pl.col("output_tokens") + more)
    found = meaning(replace(recording, requests=rows_of(longer)))
    assert found is not None
    last = int(served(workload(4, **BUSY)).last_step[7])
    assert (found.cause, found.sentence) == (ABORTED, f"request 7 was given up before step {last + 1:,}")


def test_a_request_that_was_given_up_by_step_records() -> None:
    """A recorder has every step; the records say that request 20 ended in good order, which it did not."""
    engine, requests = ENGINE, workload(4, **BUSY)
    ends = served(requests, engine)
    middle = int(ends.first_step[20] + 5)
    short = [(*row[:3], 7 if i == 20 else row[3]) for i, row in enumerate(requests)]
    assert requests[20][3] > 12
    recording, _engine = stepwise(asynchronous=False, requests=short, engine=engine)  # type: ignore[arg-type]
    told = recording.lifecycles.frame().with_columns(
        pl.when(pl.col("journey") == 20).then(requests[20][3]).otherwise("output_tokens").alias("output_tokens")
    )
    found = meaning(replace(recording, lifecycles=rows_of(told)))
    assert found is not None
    assert found.cause == ABORTED
    assert found.sentence.startswith("request 20 was given up before step")
    assert middle > 0


def test_rules_of_another_release() -> None:
    """Memory is scarce: 0.32 admits a request only if all of its prompt fits, 0.15 if its first chunk does."""
    new, old = (release_arguments({"vllm_version": version}) for version in ("0.32.0", "0.15.1"))
    engine = replace(PRESSED, num_gpu_blocks=60, max_num_batched_tokens=128, **new)
    requests = workload(5, 60, rate_per_s=40.0, prompts=(300, 600))
    recording, _engine = stepwise(asynchronous=False, requests=requests, engine=engine)
    assumed = replace(engine, scheduler_reserve_full_isl=False, **old)
    check = check_schedule(recorded_schedule(recording), assumed)
    assert check.divergence is not None
    found = meaning_of(recording, check)
    assert found is not None
    assert found.cause == VERSION
    assert list(found.hypothesis.engine) == ["vllm_version"]


def test_what_nothing_explains_is_not_named() -> None:
    """Every fifth decode count is one too low."""
    recording = recorded()
    wrong = recording.iterations.frame().with_columns(
        pl.when(pl.col("iteration") % 5 == 4).then(pl.col("decode_requests") - 1).otherwise("decode_requests").clip(0)
    )
    found = meaning(replace(recording, iterations=rows_of(wrong)))
    assert found is not None
    assert found.cause == NOT_IDENTIFIED
