"""Prompts as the load profile of a recording declares them: lengths, shared beginnings, growing conversations.

Request i is sent by user i modulo their number.  Without turns each of a user's requests carries the same
prompt: the system prompt of the user's group and a question.  With turns each goes on with the
user's conversation, its prompt being all that was said before and the question.  A conversation whose
next turn would not fit ``max_model_len`` begins anew, with the same first question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.trace import BlockKeys
from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.recording import LoadProfile, Recording, SharedPrefix
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.observed.prefix import group_of_prompts, prompt_tokens
from blis_replay.replay.profile.workload import declared_model_len, declared_profile, refuse_too_many_keys


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
    kind = f"users with {turns.turns_each} turns a conversation" if profile.multi_turn else "prompts in turn"
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
        text += f"; {prompts.mean():,.0f} prompt tokens a request, {ran:,.0f} in the recording"
    return text
