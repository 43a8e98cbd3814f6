"""Requests as the load profile of a recording declares them: what a simulator would be given without a trace.

Two readings of a profile, each with arrivals, lengths and block identities of its own:

- ``profile``, as its load generator sends it, as many requests in each stage as were recorded.  Request i is sent by
  user i modulo their number.  Without turns each of a user's requests has the same prompt: the system prompt of the
  user's group and a question.  With turns each goes on with the user's conversation, its prompt being all that was said
  before and the question.  A conversation whose next turn would not fit ``max_model_len`` begins anew, with the same
  first question.
- ``blis-spec``, as BLIS expands it: five turns per arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import ReplayError, argument_not_known
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.recording import PUBLISHED, LoadProfile, Recording, SharedPrefix, Stage
from blis_replay.replay.prefix import group_of_prompts, prompt_tokens

_SEED = 42
_PROCESSES = ("constant", "poisson")
_MAX_KEYS = 1 << 28  # block identities: 1 GB
_MAX_US = 1e15  # 30 years: a rate or pause beyond that is a slip, and times would leave int64 soon
# BLIS: turns of each arrival, and us between them beside an output token each.
_TURNS, _TURN_GAP_US = 5, 500_000


def _max_model_len(recording: Recording) -> int:
    """``max_model_len``, which bounds what a conversation can grow to; ``ReplayError`` if it is not known."""
    if "max_model_len" not in recording.engine:
        raise argument_not_known(recording.slug, "max_model_len")
    return int(recording.engine["max_model_len"].value)


def _refuse_too_many_keys(recording: Recording, keys: int) -> None:
    """Raise ``ReplayError`` for more block identities than fit in 1 GB."""
    if keys > _MAX_KEYS:
        raise ReplayError(
            f"{recording.alias}: the prompts of the load profile have {keys:,} different blocks, more than "
            f"{_MAX_KEYS:,}; use prefix=recorded"
        )


def _refuse_decades(recording: Recording, profile: LoadProfile, length_us: float) -> None:
    """Raise ``ReplayError`` for a load that takes longer than 30 years."""
    if not length_us < _MAX_US:
        raise ReplayError(f"{recording.alias}: the stages of {profile.source} last for decades; correct their rates")


@dataclass(frozen=True)
class Turns:
    """Per request, int64[n]: its user, the number of the user's conversation, and the turn of that, from 0."""

    user: Int64s
    conversation: Int64s
    turn: Int64s
    turns_each: int
    users: int

    @property
    def conversations(self) -> int:
        """The most of one user."""
        return int(self.conversation.max(initial=0)) + 1


@dataclass(frozen=True)
class LoadGenerator:
    """The profile as its load generator sends it."""

    recording: Recording
    profile: LoadProfile

    def arrivals(self) -> tuple[Int64s, str]:
        """``constant``: equal gaps at the rate of the stage; ``poisson``: a Poisson process over the stage (seeded).

        A stage begins when the time of the one before and the declared pause are over.
        """
        recording, profile = self.recording, self.profile
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
        _refuse_decades(recording, profile, sum(lengths_us) + len(counts) * profile.stage_gap_us)
        random = np.random.default_rng(_SEED)
        parts, start_us = [], 0
        for stage, count in zip(profile.stages, counts.tolist(), strict=True):
            length_us = count * 1e6 / stage.rate_per_s
            even = profile.arrivals == "constant"
            share = np.arange(count) / max(count, 1) if even else np.sort(random.random(count))
            parts.append(start_us + np.floor(share * length_us).astype(np.int64))
            start_us += stage.duration_us + profile.stage_gap_us
        # A stage with more requests than it declares runs into the next one.
        arrival_us = np.sort(np.concatenate(parts), kind="stable")
        return arrival_us - arrival_us[0], _arrivals_basis(recording, profile, counts)

    def lengths(self) -> tuple[Int64s, Int64s, str]:
        """Prompt and output tokens."""
        workload, turns = self._workload, self._turns()
        turn_tokens = workload.question_tokens + workload.output_tokens
        prompts = workload.system_prompt_tokens + workload.question_tokens + turns.turn * turn_tokens
        outputs = np.full(len(prompts), workload.output_tokens, np.int64)
        return prompts, outputs, _lengths_basis(self.recording, self.profile, workload, turns, prompts)

    def blocks(self, prompts: Int64s) -> tuple[BlockKeys, str]:
        """Block identities: shared within a group, a user and a conversation."""
        recording, profile, workload, turns = self.recording, self.profile, self._workload, self._turns()
        block = int(recording.engine["block_size"].value)
        # Answers belong to the conversation: the next turn repeats them.
        tokens = prompts + (workload.output_tokens if profile.multi_turn else 0)
        longest = int((tokens // block).max(initial=0))
        _refuse_too_many_keys(recording, turns.users * turns.conversations * max(longest, 1))
        keys = _keys(workload, turns, tokens // block, block)
        groups = f"{workload.num_groups} groups of {workload.num_prompts_per_group}"
        kind = f"users with {turns.turns_each} turns per conversation" if profile.multi_turn else "prompts in turn"
        text = f"{groups} {kind} as {profile.source} declares; membership drawn"
        if (ran := recording.shared_prefix) is not None:
            in_groups = ran.num_groups, ran.num_prompts_per_group
            if in_groups != (workload.num_groups, workload.num_prompts_per_group):
                text += f"; {in_groups[0]} groups of {in_groups[1]} ran"
        return keys, text

    @property
    def _workload(self) -> SharedPrefix:
        if self.profile.shared_prefix is None:
            raise ReplayError(
                f"{self.recording.alias}: {self.profile.source} declares no shared-prefix prompts; "
                "use lengths=true and prefix=recorded"
            )
        return self.profile.shared_prefix

    def _turns(self) -> Turns:
        workload = self._workload
        users = workload.num_groups * workload.num_prompts_per_group
        index = np.arange(self.recording.requests.height)
        user, sent = index % users, index // users
        if not self.profile.multi_turn:
            return Turns(user, np.zeros_like(user), np.zeros_like(user), 1, users)
        room = _max_model_len(self.recording) - workload.system_prompt_tokens
        turns_each = max(room // (workload.question_tokens + workload.output_tokens), 1)
        return Turns(user, sent // turns_each, sent % turns_each, turns_each, users)


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


def _arrivals_basis(recording: Recording, profile: LoadProfile, counts: Int64s) -> str:
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


def _keys(workload: SharedPrefix, turns: Turns, count: Int64s, block: int) -> BlockKeys:
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
    recording: Recording, profile: LoadProfile, workload: SharedPrefix, turns: Turns, prompts: Int64s
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


@dataclass(frozen=True)
class BlisExpansion:
    """The profile as BLIS expands it (seeded), as many requests as were recorded.

    Clients that share the rate equally and are Poisson each are one Poisson process together.  A prompt is the
    question, after all questions and answers before it, without the system prompt; as much of it as fits
    ``max_model_len`` beside the answer.
    """

    recording: Recording
    profile: LoadProfile

    def arrivals(self) -> tuple[Int64s, str]:
        """Arrival times, us: all turns of an arrival follow at once."""
        sent_us, _, _ = self._expanded()
        arrival_us = np.floor(sent_us).astype(np.int64)
        turns, rate = self._turns_each, self._per_us * 1e6
        at_once = f", {turns} turns each at once, so {turns * rate:g} requests/s" if turns > 1 else ""
        basis = f"{self.profile.source} as BLIS expands it: {rate:g} arrivals/s throughout{at_once}"
        return arrival_us - arrival_us[0], basis

    def lengths(self) -> tuple[Int64s, Int64s, str]:
        """Prompt and output tokens."""
        _, _, turn = self._expanded()
        workload = self._workload
        prompts = workload.question_tokens + turn * (workload.question_tokens + workload.output_tokens)
        room = max(_max_model_len(self.recording) - workload.output_tokens, 1)
        too_long = int((prompts > room).sum())
        basis = f"{workload.output_tokens}, prompts of {workload.question_tokens}, the next turn's after all before it"
        if too_long:
            basis += f"; {too_long} prompts cut to fit max_model_len"
        prompts = np.minimum(prompts, room)
        outputs = np.full(len(prompts), workload.output_tokens, np.int64)
        return prompts, outputs, f"{basis}; {prompts.mean():,.0f} prompt tokens per request"

    def blocks(self, prompts: Int64s) -> tuple[BlockKeys, str]:
        """Block identities: turns share what was said before, nobody else does."""
        _, conversation, _ = self._expanded()
        conversation = np.unique(conversation, return_inverse=True)[1]
        block = int(self.recording.engine["block_size"].value)
        count = (prompts + self._workload.output_tokens) // block
        length = int(count.max(initial=0))
        different = (int(conversation.max(initial=-1)) + 1) * length
        _refuse_too_many_keys(self.recording, different)
        keys = BlockKeys(conversation * length, count, np.arange(different, dtype=np.int32), block)
        return keys, "own prompts for every arrival, shared by its turns"

    @property
    def _workload(self) -> SharedPrefix:
        if not self.profile.stages or self.profile.shared_prefix is None:
            raise ReplayError(
                f"{self.recording.alias}: {self.profile.source} declares no stages of shared-prefix prompts, which is "
                "what BLIS expands; use --replay exact"
            )
        return self.profile.shared_prefix

    @property
    def _turns_each(self) -> int:
        return _TURNS if self.profile.multi_turn else 1

    @property
    def _per_us(self) -> float:
        stages = self.profile.stages
        return sum(s.rate_per_s * s.duration_us for s in stages) / 1e6 / sum(s.duration_us for s in stages)

    def _expanded(self) -> tuple[Floats, Int64s, Int64s]:
        """When the requests are sent (us, ascending), their conversations, and the turn of those."""
        workload, n, per_us = self._workload, self.recording.requests.height, self._per_us
        _refuse_decades(self.recording, self.profile, n / per_us if per_us else np.inf)
        conversation, turn = np.repeat(np.arange(n), self._turns_each), np.tile(np.arange(self._turns_each), n)
        first_us = np.cumsum(np.random.default_rng(_SEED).exponential(1 / per_us, n))
        sent_us = first_us[conversation] + turn * (_TURN_GAP_US + workload.output_tokens)
        order = np.argsort(sent_us, kind="stable")[:n]
        return sent_us[order], conversation[order], turn[order]
