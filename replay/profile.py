"""Requests as the load profile of a recording declares them: what a simulator would be given without a trace.

Request i of what is generated stands for request i of the recording, and as many are sent in each stage as
were recorded, so that a replay can be compared request by request.

Request i is sent by user i modulo their number.  Without turns each of a user's requests carries the same
prompt: the system prompt of the user's group and a question.  With turns each goes on with the
user's conversation, its prompt being all that was said before and the question.  A conversation whose
next turn would not fit ``max_model_len`` begins anew, with the same first question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.blis.closed_loop import ClosedLoop
from blis_replay.blis.trace import BlockKeys
from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.recording import PUBLISHED, REQUEST_SCHEMA, LoadProfile, Recording, SharedPrefix, Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.errors import ReplayError, argument_not_known
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.prefix import group_of_prompts, prompt_tokens

SEED = 42
_PROCESSES = ("constant", "poisson")
_MOST_KEYS = 1 << 28
# 30 years: a rate or pause beyond that is a slip, and times would leave int64 soon.
_LONGEST_US = 1e15


def declared_profile(recording: Recording) -> LoadProfile:
    """The load profile of a recording; raises ``ReplayError`` if it has none."""
    if recording.load_profile is None:
        raise ReplayError(
            f"{recording.alias}: no load profile is recorded, so no requests can be generated from it; ingest the "
            "recording with its profile.yaml or results/config.yaml"
        )
    return recording.load_profile


def declared_model_len(recording: Recording) -> int:
    """``max_model_len``, which bounds what a conversation can grow to; ``ReplayError`` if it is not known."""
    if "max_model_len" not in recording.engine:
        raise argument_not_known(recording.slug, "max_model_len")
    return int(recording.engine["max_model_len"].value)


def refuse_too_many_keys(recording: Recording, keys: int) -> None:
    """Raise ``ReplayError`` for more block identities than fit in 1 GB."""
    if keys > _MOST_KEYS:
        raise ReplayError(
            f"{recording.alias}: the prompts of the load profile have {keys:,} different blocks, more than "
            f"{_MOST_KEYS:,}; use prefix=recorded"
        )


def refuse_decades(recording: Recording, profile: LoadProfile, length_us: float) -> None:
    """Raise ``ReplayError`` for a load that takes longer than 30 years."""
    if not length_us < _LONGEST_US:
        raise ReplayError(f"{recording.alias}: the stages of {profile.source} last for decades; correct their rates")


def profile_arrivals(recording: Recording) -> tuple[Int64s, str]:
    """int64[n] us: arrivals as declared, and in words how they differ from those that were recorded.

    ``constant``: equal gaps at the rate of the stage; ``poisson``: a Poisson process over the stage that
    gives as many requests (seeded).  A stage begins when the time of the one before and the declared pause are
    over.  Raises ``ReplayError`` without a profile, stages or a known process.
    """
    profile = declared_profile(recording)
    if not profile.stages:
        raise ReplayError(f"{recording.alias}: {profile.source} declares no load stages; use arrivals=recorded")
    if profile.arrivals not in _PROCESSES:
        raise ReplayError(
            f"{recording.alias}: {profile.source} declares {profile.arrivals or 'no'} arrivals; only "
            f"{' and '.join(_PROCESSES)} ones can be generated, use arrivals=recorded"
        )
    counts = stage_counts(recording, profile.stages)
    lengths_us = (
        max(s.duration_us, n * 1e6 / s.rate_per_s) for s, n in zip(profile.stages, counts.tolist(), strict=True)
    )
    refuse_decades(recording, profile, sum(lengths_us) + len(counts) * profile.stage_gap_us)
    random = np.random.default_rng(SEED)
    parts, start_us = [], 0
    for stage, count in zip(profile.stages, counts.tolist(), strict=True):
        length_us = count * 1e6 / stage.rate_per_s
        share = np.arange(count) / max(count, 1) if profile.arrivals == "constant" else np.sort(random.random(count))
        parts.append(start_us + np.floor(share * length_us).astype(np.int64))
        start_us += stage.duration_us + profile.stage_gap_us
    # A stage with more requests than it declares runs into the next one.
    arrival_us = np.sort(np.concatenate(parts), kind="stable")
    return arrival_us - arrival_us[0], _basis(recording, profile, counts)


def stage_counts(recording: Recording, stages: tuple[Stage, ...]) -> Int64s:
    """int64[stages]: requests to send in each; as many as recorded, which are dealt out as declared if that is not."""
    recorded, n = recording.requests["stage"], recording.requests.height
    numbers = [stage.stage for stage in stages]
    if recorded.null_count() == 0 and recorded.is_in(numbers).all():
        return np.array([int((recorded == number).sum()) for number in numbers], np.int64)
    # Of the largest, so that no product is too large for a float.
    most = max(stage.rate_per_s for stage in stages)
    declared = np.cumsum([stage.rate_per_s / most * stage.duration_us for stage in stages])
    counts: Int64s = np.diff(np.rint(declared / declared[-1] * n).astype(np.int64), prepend=0)
    return counts


def _basis(recording: Recording, profile: LoadProfile, counts: Int64s) -> str:
    rates = " and ".join(f"{stage.rate_per_s:g}" for stage in profile.stages)
    text = f"{profile.arrivals} at {rates} requests/s as {profile.source} declares"
    if len(profile.stages) > 1:
        text += f", {profile.stage_gap_us / 1e6:g} s between stages"
    asked = [f"{stage.rate_per_s * stage.duration_us / 1e6:.0f}" for stage in profile.stages]
    sent = [f"{count}" for count in counts.tolist()]
    if asked != sent:
        text += f"; {' and '.join(sent)} requests per stage as recorded, not the {' and '.join(asked)} declared"
    return f"{text}; {_effective(recording)}"


def _effective(recording: Recording) -> str:
    """How requests really arrived: the variation of their gaps within stages, and the pauses between those."""
    requests = recording.requests.select("stage", "arrival_us")
    stages = [of_stage["arrival_us"].to_numpy() for of_stage in requests.partition_by("stage", maintain_order=True)]
    gaps = [np.diff(arrivals) for arrivals in stages if len(arrivals) > 2]
    if not gaps:
        return "too few were recorded to tell how they really came"
    word = "reconstructed" if recording.ground_truth == PUBLISHED else "recorded"
    variation = np.mean([gap.std() / max(gap.mean(), 1.0) for gap in gaps])
    pauses = ", ".join(f"{(b[0] - a[-1]) / 1e6:.1f}" for a, b in pairwise(stages))
    apart = f", stages {pauses} s apart" if pauses else ""
    return f"{word} gaps vary by {variation:.2f} of their mean (constant 0, Poisson 1){apart}"


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
    return prompts, f"{basis}; {prompts.mean():,.0f} prompt tokens per request"


@dataclass(frozen=True)
class GeneratedLengths:
    """int64[n] each, and in words where they come from and how they differ from what was recorded."""

    prompt_tokens: Int64s
    output_tokens: Int64s
    basis: str


@dataclass(frozen=True)
class _Turns:
    """Of each request, int64[n]: its user, which of the user's conversations, and which turn of that (from 0)."""

    user: Int64s
    conversation: Int64s
    turn: Int64s
    turns_each: int
    users: int

    @property
    def conversations(self) -> int:
        """Most of one user."""
        return int(self.conversation.max(initial=0)) + 1


def profile_lengths(recording: Recording) -> GeneratedLengths:
    """Prompt and output tokens of all requests as declared.

    Raises ``ReplayError`` without a profile, if its prompts are no shared-prefix ones, or if they grow
    and ``max_model_len`` is not known.
    """
    profile, workload = _declared(recording)
    turns = _turns(recording, profile, workload)
    turn_tokens = workload.question_tokens + workload.output_tokens
    prompts = workload.system_prompt_tokens + workload.question_tokens + turns.turn * turn_tokens
    return GeneratedLengths(
        prompts,
        np.full(len(prompts), workload.output_tokens, np.int64),
        _lengths_basis(recording, profile, workload, turns, prompts),
    )


def profile_blocks(recording: Recording, prompts: Int64s) -> tuple[BlockKeys, str]:
    """Block identities of prompts of these lengths (int64[n]) as declared, and in words what they are.

    Raises ``ReplayError`` as ``profile_lengths`` does, or for more than 2^28 blocks.
    """
    profile, workload = _declared(recording)
    turns = _turns(recording, profile, workload)
    block = int(recording.engine["block_size"].value)
    # Answers belong to the conversation: the next turn repeats them.
    tokens = prompts + (workload.output_tokens if profile.multi_turn else 0)
    longest = int((tokens // block).max(initial=0))
    refuse_too_many_keys(recording, turns.users * turns.conversations * max(longest, 1))
    keys = _keys(workload, turns, tokens // block, block)
    groups = f"{workload.num_groups} groups of {workload.num_prompts_per_group}"
    kind = f"users with {turns.turns_each} turns per conversation" if profile.multi_turn else "prompts in turn"
    text = f"{groups} {kind} as {profile.source} declares; membership drawn"
    if recording.shared_prefix is not None and (ran := _groups_of(recording.shared_prefix)) != _groups_of(workload):
        text += f"; {ran[0]} groups of {ran[1]} ran"
    return keys, text


def _declared(recording: Recording) -> tuple[LoadProfile, SharedPrefix]:
    profile = declared_profile(recording)
    if profile.shared_prefix is None:
        raise ReplayError(
            f"{recording.alias}: {profile.source} declares no shared-prefix prompts; "
            "use lengths=true and prefix=recorded"
        )
    return profile, profile.shared_prefix


def _groups_of(workload: SharedPrefix) -> tuple[int, int]:
    return workload.num_groups, workload.num_prompts_per_group


def _turns(recording: Recording, profile: LoadProfile, workload: SharedPrefix) -> _Turns:
    users = workload.num_groups * workload.num_prompts_per_group
    index = np.arange(recording.requests.height)
    user, sent = index % users, index // users
    if not profile.multi_turn:
        return _Turns(user, np.zeros_like(user), np.zeros_like(user), 1, users)
    room = declared_model_len(recording) - workload.system_prompt_tokens
    turns_each = max(room // (workload.question_tokens + workload.output_tokens), 1)
    return _Turns(user, sent // turns_each, sent % turns_each, turns_each, users)


def _keys(workload: SharedPrefix, turns: _Turns, count: Int64s, block: int) -> BlockKeys:
    """A row of keys for each conversation: its group's system prompt, its user's first question, then its own."""
    users, conversations, length = turns.users, turns.conversations, int(count.max(initial=0))
    asked = workload.system_prompt_tokens + workload.question_tokens
    of_group = min(workload.system_prompt_tokens // block, length)
    of_user = min(asked // block, length) - of_group
    own = length - of_group - of_user
    rows = np.empty((users, conversations, length), np.int32)
    rows[:, :, :of_group] = group_of_prompts(workload)[:, None, None] * of_group + np.arange(of_group)
    first = workload.num_groups * of_group
    rows[:, :, of_group : of_group + of_user] = first + np.arange(users * of_user).reshape(users, 1, of_user)
    first += users * of_user
    rows[:, :, of_group + of_user :] = first + np.arange(users * conversations * own).reshape(users, conversations, own)
    start = (turns.user * conversations + turns.conversation) * length
    return BlockKeys(start, count, rows.reshape(-1), block)


def _lengths_basis(
    recording: Recording, profile: LoadProfile, workload: SharedPrefix, turns: _Turns, prompts: Int64s
) -> str:
    text = (
        f"{workload.output_tokens} as {profile.source} declares, prompts of {workload.system_prompt_tokens} + "
        f"{workload.question_tokens}"
    )
    if profile.multi_turn:
        text += f" growing over {turns.turns_each} turns, sent whether or not the turn before was answered"
    recorded = recording.requests["prompt_tokens"]
    if recorded.null_count() < len(recorded):
        ran = prompt_tokens(recording).mean()
        text += f"; {prompts.mean():,.0f} prompt tokens per request, {ran:,.0f} in the recording"
    return text


# Lengths of requests of which only the mean was published: none is more than this share from it.  Requests that are
# all as long are answered together and prefill together, which no load of single requests does.
_SPREAD = 0.1
# What a summary of a load generator can have sent; beyond it is a slip.
_MOST_MADE = 1_000_000
_WHOLE_RUN = -1
# What a replay of such requests says of them.
MADE = (
    "made of a summary: as many as it says, of its mean lengths, spread evenly over 10 % on either side, prompts as "
    "far as max_model_len has room"
)


def of_aggregates(recording: Recording) -> Recording:
    """A recording with requests made of its aggregates, where that is all it has; else as it is.

    As many in each load stage as were sent, in a Poisson process at its rate, with lengths spread evenly over 10 % on
    either side of the mean; prompts over less where longer ones would not fit ``max_model_len``, as the server took
    them all.  Raises ``ReplayError`` for aggregates that say neither how many nor how long.
    """
    if recording.requests.height or not recording.is_summed_up:
        return recording
    random = np.random.default_rng(SEED)
    parts, start_us = [], 0
    stages = recording.stages
    if not stages and clients_of(recording) is not None:  # in a closed loop no arrival is used
        stages = (Stage(0, 1.0, 0),)
    for stage in stages:
        figures = _figures(recording, stage.stage)
        count = round(figures["requests"])
        share = np.sort(random.random(count))
        if not count * 1e6 / stage.rate_per_s < _LONGEST_US:
            raise ReplayError(
                f"{recording.alias}: stage {stage.stage} of its summary lasts for decades; correct its rate"
            )
        arrival_us = start_us + np.floor(share * count * 1e6 / stage.rate_per_s).astype(np.int64)
        start_us += stage.duration_us
        spread = random.uniform(1 - _SPREAD, 1 + _SPREAD, (2, count))
        spread[0] = 1 + (spread[0] - 1) * _room(recording, figures["prompt_tokens"])
        lengths = np.maximum(np.rint(spread * [[figures["prompt_tokens"]], [figures["output_tokens"]]]), 1)
        parts.append((np.full(count, stage.stage), arrival_us, *lengths.astype(np.int64)))
    if not parts:
        raise ReplayError(
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
        output_tokens_source=pl.lit("mean of a summary, spread by 10 %"),
        status=pl.lit("ok"),
    )
    columns = (
        (pl.col(name) if name in frame.columns else pl.lit(None).alias(name)).cast(kind)
        for name, kind in REQUEST_SCHEMA.items()
    )
    return replace(recording, requests=rows_of(frame.select(columns)))


def _room(recording: Recording, prompt_tokens: float) -> float:
    """How much of the spread of prompts the server took: none of them can be ``max_model_len`` tokens long."""
    if "max_model_len" not in recording.engine:
        return 1.0
    most = int(recording.engine["max_model_len"].value) - 1
    return min(max(most / prompt_tokens - 1, 0.0) / _SPREAD, 1.0)


def clients_of(recording: Recording) -> ClosedLoop | None:
    """The clients that sent the requests of a summary, each the next when the one before was answered; None if open.

    Raises ``ReplayError`` where its stages had different numbers of clients.
    """
    asked = recording.aggregates.filter(pl.col("metric") == "concurrency")["value"].unique().to_list()
    if len(asked) > 1:
        shown = ", ".join(f"{clients:g}" for clients in sorted(asked))
        raise ReplayError(f"{recording.alias}: its stages had {shown} clients; ingest each point as a recording")
    return ClosedLoop(max(round(asked[0]), 1)) if asked else None


def of_summary(recording: Recording, mode: ReplayMode) -> tuple[Recording, ReplayMode]:
    """With requests made of the aggregates, and sent by their clients, where a recording has nothing else.

    Raises ``ReplayError`` as ``of_aggregates`` and ``clients_of`` do.
    """
    if recording.requests.height == 0 and mode.loop is None and (clients := clients_of(recording)):
        mode = replace(mode, loop=clients)
    return of_aggregates(recording), mode


def _figures(recording: Recording, stage: int) -> dict[str, float]:
    """What the aggregates of a stage say of its requests: how many, and the mean lengths."""
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
    figures = {}
    for name, places in wanted.items():
        value = next((found[place] for place in places if place in found), 0.0)
        if not 1 <= value <= _MOST_MADE:
            raise ReplayError(
                f"{recording.alias}: its summary does not say its {name.replace('_', ' ')} in stage {stage}, so no "
                "requests can be made of it; ingest its per-request records"
            )
        figures[name] = value
    return figures
