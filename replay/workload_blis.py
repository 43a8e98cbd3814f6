"""The load profile of a recording as BLIS expands its ``inference_perf`` section (blis-semantics, section 5).

That is how the published workload-spec replays were fed: every user a Poisson client, the rates of the stages
averaged over the run, and where the profile asks for turns, five for each arrival, sent 0.5 s apart
without waiting, while the number of arrivals is not divided by five.  The list is cut off after as many requests as
there should be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.workload import SEED, declared_profile

_TURNS, _TURN_GAP_US = 5, 500_000


@dataclass(frozen=True)
class BlisSpec:
    """int64[n] each, in order of arrival, and in words what they are."""

    arrival_us: Int64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    basis: str


def blis_spec(recording: Recording) -> BlisSpec:
    """As many requests as the recording has, expanded from its profile as BLIS does (seeded).

    Clients that share the rate equally and are Poisson each are one Poisson process together.  A prompt
    is the question, after all questions and answers before it, without the system prompt.  Raises
    ``ReplayError`` without a profile with stages and shared-prefix prompts.
    """
    profile = declared_profile(recording)
    workload, n = profile.shared_prefix, recording.requests.height
    if not profile.stages or workload is None:
        raise ReplayError(
            f"{recording.alias}: {profile.source} declares no stages of shared-prefix prompts, which is what BLIS "
            "expands; use --replay exact"
        )
    duration_us = sum(stage.duration_us for stage in profile.stages)
    rate_per_us = sum(stage.rate_per_s * stage.duration_us for stage in profile.stages) / 1e6 / duration_us
    turns = _TURNS if profile.multi_turn else 1
    first_us = np.cumsum(np.random.default_rng(SEED).exponential(1 / rate_per_us, n))
    turn = np.tile(np.arange(turns), n)
    sent_us = np.repeat(first_us, turns) + turn * (_TURN_GAP_US + workload.output_tokens)
    order = np.argsort(sent_us, kind="stable")[:n]
    arrival_us = np.floor(sent_us[order]).astype(np.int64)
    said = workload.question_tokens + workload.output_tokens
    basis = f"{profile.source} as BLIS expands it: {rate_per_us * 1e6:g} arrivals/s throughout"
    if turns > 1:
        basis += f", {turns} turns each at once, so {turns * rate_per_us * 1e6:g} requests/s"
    return BlisSpec(
        arrival_us - arrival_us[0],
        workload.question_tokens + turn[order] * said,
        np.full(n, workload.output_tokens, np.int64),
        basis,
    )
