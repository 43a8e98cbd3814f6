"""Requests made of a summary: what is replayed where nobody recorded single requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import UnreplayableError
from blis_replay.blis.closed_loop import ClosedLoop
from blis_replay.ingest.readers.documents import aggregate_frame, may_be_equal
from blis_replay.ingest.recording import REQUEST_SCHEMA, Recording, Stage
from blis_replay.ingest.rows import no_rows, rows_of, shaped
from blis_replay.ingest.served import published
from blis_replay.replay.mode import ReplayMode

_SEED = 42
# Share: lengths lie this far on either side of the mean, unless the summary says it; equal ones would end together.
_SPREAD = 0.1
_LEAST_BURSTINESS = 0.01  # of --burstiness; with less all requests would come at once
_MAX_REQUESTS = 1_000_000  # of a summary; more is a slip
_MAX_US = 1e15  # 30 years: a longer run is a slip, and times would leave int64 soon
_WHOLE_RUN = -1  # stage of aggregates over all stages
_OF_MEAN = "mean of a summary"
# What a replay of such requests says of them.
MADE = (
    "made of a summary: as many as it says, of its mean lengths, spread evenly over 10 % on either side (or as it "
    "says), prompts as far as max_model_len has room"
)


def of_summary(recording: Recording, mode: ReplayMode) -> tuple[Recording, ReplayMode]:
    """With requests made of the aggregates, and sent by their clients, where a recording has nothing else.

    Raises ``ReplayError`` as ``of_aggregates`` and ``clients_of`` do.
    """
    if recording.requests.height == 0 and mode.loop is None and (clients := clients_of(recording)):
        mode = replace(mode, loop=clients)
    return of_aggregates(recording), mode


def of_aggregates(recording: Recording) -> Recording:
    """A recording with requests made of its aggregates, where that is all it has; else as it is.

    Each load stage gets as many as were sent, in a Poisson process at its rate; where ``vllm bench`` had another
    ``--burstiness``, gaps have a gamma distribution of that shape.  Lengths spread evenly over 10 % on either side of
    the mean, or as the summary says.  Prompts spread over less where longer ones would not fit ``max_model_len``, as
    the server took them all.  Raises ``ReplayError`` for aggregates without numbers or lengths of requests.
    """
    if recording.requests.height or not recording.is_summed_up:
        return recording
    random = np.random.default_rng(_SEED)
    parts, start_us = [], 0
    stages = recording.stages
    if not stages and clients_of(recording) is not None:  # in a closed loop no arrival is used
        stages = (Stage(0, 1.0, 0),)
    for stage in stages:
        figures = _figures(recording, stage.stage)
        count = round(figures["requests"])
        share = _sends(figures["burstiness"], count, random)
        if not count * 1e6 / stage.rate_per_s < _MAX_US:
            raise UnreplayableError(
                f"{recording.alias}: stage {stage.stage} of its summary lasts for decades; correct its rate"
            )
        arrival_us = start_us + np.floor(share * count * 1e6 / stage.rate_per_s).astype(np.int64)
        start_us += stage.duration_us
        width = figures["spread"]
        spread = random.uniform(1 - width, 1 + width, (2, count))
        spread[0] = 1 + (spread[0] - 1) * _room(recording, figures["prompt_tokens"], width)
        lengths = np.maximum(np.rint(spread * [[figures["prompt_tokens"]], [figures["output_tokens"]]]), 1)
        parts.append((np.full(count, stage.stage), arrival_us, *lengths.astype(np.int64)))
    if not parts:
        raise UnreplayableError(
            f"{recording.alias}: its summary says no rate, so no requests can be made of it; ingest its per-request "
            "records"
        )
    of_stage, arrivals, prompts, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(arrivals, kind="stable")
    made = {
        "request_index": np.arange(len(order)),
        "stage": of_stage[order],
        "arrival_us": arrivals[order] - arrivals.min(),
        "prompt_tokens": prompts[order],
        "output_tokens": outputs[order],
    }
    frame = pl.DataFrame(made).with_columns(
        request_id=pl.format("made-{}", "request_index"),
        output_tokens_source=pl.lit(_OF_MEAN),
        status=pl.lit("ok"),
    )
    return replace(recording, requests=rows_of(shaped(frame, REQUEST_SCHEMA)))


def with_equal_lengths(recording: Recording) -> Recording | None:
    """The summary of requests that are all as long as the mean; None of another recording, or where it says.

    ``recording``: as ``of_aggregates`` returns it.
    """
    told = (recording.aggregates["metric"] == "lengths").any()
    made = recording.requests.height and (recording.requests["output_tokens_source"] == _OF_MEAN).all()
    slow_us, usual_us = (published(recording.aggregates, _WHOLE_RUN, "e2e", s) or 0.0 for s in ("p99", "p50"))
    if told or not made or not may_be_equal(slow_us, usual_us):
        return None
    stages = [_WHOLE_RUN, *(of.stage for of in recording.stages)]
    said = aggregate_frame((stage, "lengths", "spread", 0.0) for stage in stages)
    return replace(recording, requests=no_rows(REQUEST_SCHEMA), aggregates=pl.concat([recording.aggregates, said]))


def _sends(burstiness: float, count: int, random: np.random.Generator) -> Floats:
    """float64[count]: when requests are sent, as shares of the time, ascending; 1 is a Poisson process."""
    if burstiness == 1:
        return np.sort(random.random(count))
    times = np.cumsum(random.gamma(burstiness, size=count + 1))
    return np.asarray(times[:-1] / times[-1], np.float64)


def _room(recording: Recording, prompt_tokens: float, width: float) -> float:
    """How much of the spread of prompts the server took: none of them can be ``max_model_len`` tokens long."""
    if "max_model_len" not in recording.engine:
        return 1.0
    most = int(recording.engine["max_model_len"].value) - 1
    return min(max(most / prompt_tokens - 1, 0.0) / width, 1.0) if width else 1.0


def clients_of(recording: Recording) -> ClosedLoop | None:
    """The clients that sent the requests of a summary, each the next when the one before was answered; None if open.

    Raises ``ReplayError`` where its stages had different numbers of clients.
    """
    asked = recording.aggregates.filter(pl.col("metric") == "concurrency")["value"].unique().to_list()
    if len(asked) > 1:
        shown = ", ".join(f"{clients:g}" for clients in sorted(asked))
        raise UnreplayableError(f"{recording.alias}: its stages had {shown} clients; ingest each point as a recording")
    return ClosedLoop(max(round(asked[0]), 1)) if asked else None


def _figures(recording: Recording, stage: int) -> dict[str, float]:
    """What the aggregates of a stage say of its requests: how many, the mean lengths, and how they vary."""
    found = {
        (metric, statistic): value
        for of, metric, statistic, value in recording.aggregates.iter_rows()
        if of == stage or (of == _WHOLE_RUN and len(recording.stages) <= 1)
    }
    wanted = {
        "requests": (("requests", "sent"), ("requests", "succeeded")),
        "prompt_tokens": (("prompt_tokens", "mean"),),
        "output_tokens": (("output_tokens", "mean"), ("output_tokens_reported", "mean")),
    }
    figures = {
        "spread": found.get(("lengths", "spread"), _SPREAD),
        "burstiness": max(found.get(("burstiness", "asked"), 1.0), _LEAST_BURSTINESS),
    }
    for name, places in wanted.items():
        value = next((found[place] for place in places if place in found), 0.0)
        if not 1 <= value <= _MAX_REQUESTS:
            raise UnreplayableError(
                f"{recording.alias}: its summary does not say its {name.replace('_', ' ')} in stage {stage}, so no "
                "requests can be made of it; ingest its per-request records"
            )
        figures[name] = value
    return figures
