"""The load profile of a recording as BLIS expands its ``inference_perf`` section (blis-semantics, section 5).

That is how the published workload-spec replays were fed: every user a Poisson client, the rates of the stages
averaged over the run, and where the profile asks for turns, five for each arrival, sent 0.5 s apart
without waiting for an answer, while the number of arrivals is not divided by five.  The list is cut off after as
many requests as there should be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.trace import BlockKeys, Int64s
from blis_replay.ingest.recording import Recording, SharedPrefix
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.workload import (
    SEED,
    declared_model_len,
    declared_profile,
    refuse_decades,
    refuse_too_many_keys,
)

_TURNS, _TURN_GAP_US = 5, 500_000


@dataclass(frozen=True)
class BlisSpec:
    """int64[n] each, in order of arrival, and in words what arrivals and lengths are.

    ``conversation``: numbered from 0, whose turns repeat what was said before.
    """

    arrival_us: Int64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    conversation: Int64s
    arrival_basis: str
    length_basis: str


def blis_spec(recording: Recording) -> BlisSpec:
    """As many requests as the recording has, expanded from its profile as BLIS does (seeded).

    Clients that share the rate equally and are Poisson each are one Poisson process together.  A prompt
    is the question, after all questions and answers before it, without the system prompt; as much of it
    as fits ``max_model_len`` beside the answer.  Raises ``ReplayError`` without a profile with stages and
    shared-prefix prompts.
    """
    profile = declared_profile(recording)
    workload, n = profile.shared_prefix, recording.requests.height
    if not profile.stages or workload is None:
        raise ReplayError(
            f"{recording.alias}: {profile.source} declares no stages of shared-prefix prompts, which is what BLIS "
            "expands; use --replay exact"
        )
    duration_us = sum(stage.duration_us for stage in profile.stages)
    per_us = sum(stage.rate_per_s * stage.duration_us for stage in profile.stages) / 1e6 / duration_us
    refuse_decades(recording, profile, n / per_us if per_us else np.inf)
    turns = _TURNS if profile.multi_turn else 1
    conversation, turn = np.repeat(np.arange(n), turns), np.tile(np.arange(turns), n)
    first_us = np.cumsum(np.random.default_rng(SEED).exponential(1 / per_us, n))
    sent_us = first_us[conversation] + turn * (_TURN_GAP_US + workload.output_tokens)
    order = np.argsort(sent_us, kind="stable")[:n]
    arrival_us = np.floor(sent_us[order]).astype(np.int64)
    prompts, length_basis = _prompts(recording, workload, turn[order])
    at_once = f", {turns} turns each at once, so {turns * per_us * 1e6:g} requests/s" if turns > 1 else ""
    arrival_basis = f"{profile.source} as BLIS expands it: {per_us * 1e6:g} arrivals/s throughout{at_once}"
    return BlisSpec(
        arrival_us - arrival_us[0],
        prompts,
        np.full(n, workload.output_tokens, np.int64),
        np.unique(conversation[order], return_inverse=True)[1],
        arrival_basis,
        length_basis,
    )


def blis_blocks(recording: Recording, prompts: Int64s) -> tuple[BlockKeys, str]:
    """Block identities of prompts of these lengths (int64[n]): turns share what was said before, nobody else does."""
    spec, block = blis_spec(recording), int(recording.engine["block_size"].value)
    count = (prompts + spec.output_tokens) // block
    length = int(count.max(initial=0))
    different = (int(spec.conversation.max(initial=-1)) + 1) * length
    refuse_too_many_keys(recording, different)
    keys = BlockKeys(spec.conversation * length, count, np.arange(different, dtype=np.int32), block)
    return keys, "own prompts for every arrival, shared by its turns"


def _prompts(recording: Recording, workload: SharedPrefix, turn: Int64s) -> tuple[Int64s, str]:
    prompts = workload.question_tokens + turn * (workload.question_tokens + workload.output_tokens)
    room = max(declared_model_len(recording) - workload.output_tokens, 1)
    too_long = int((prompts > room).sum())
    basis = f"{workload.output_tokens}, prompts of {workload.question_tokens}, the next turn's after all before it"
    if too_long:
        basis += f"; {too_long} prompts cut to fit max_model_len"
    prompts = np.minimum(prompts, room)
    return prompts, f"{basis}; {prompts.mean():,.0f} prompt tokens a request"
