"""A compiled scan of inference-perf's per-request records: their numbers, into one row of int64 each.

What it takes is a record as the tool prints it, in any order of keys and with any white
space; all else (other types, exponents, keys with escapes or given twice, a body that is no
JSON object) is left to the decoder as a whole record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.scan.compiled import compiled, entry
from blis_replay.ingest.scan.json_text import (
    BACKSLASH,
    BEYOND_ASCII,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COMMA,
    NULL_LETTER,
    OPEN_BRACE,
    OPEN_BRACKET,
    PADDING_BYTES,
    QUOTE,
    UNUSUAL,
    Bytes,
    after_brackets,
    after_colon,
    after_false,
    after_null,
    after_space,
    after_true,
    after_value,
    as_double,
    decimal,
    digest,
    integer,
    is_plain_word,
    next_member,
    put_escaped,
)
from blis_replay.ingest.scan.names import name_at, names_of
from blis_replay.ingest.scan.prompt_hashes import Hashes, prompt_hashes
from blis_replay.ingest.scan.words import Words

Int64s = NDArray[np.int64]

# Columns of a row.  Positions are in the window; what is absent or null is -1.
FIELDS = (
    "ordinal",  # among the records of the file, from 1; for the caller to fill
    "record_at",
    "record_end",
    "taken",  # 0: for the decoder
    "digest",  # of its bytes
    "start_us",
    "end_us",
    "first_us",  # its first stream stamp
    "stamps_at",  # place of its first stream stamp among those of this call
    "stamps",
    "info_times_at",  # the three lists that can hold them, by ascending worth
    "info_times",
    "token_times_at",
    "token_times",
    "chunk_times_at",
    "chunk_times",
    "free_at",  # behind its last stamp
    "input_tokens",
    "info_output_tokens",
    "output_tokens",
    "usage_prompt_tokens",
    "usage_completion_tokens",
    "cached_tokens",
    "request_at",  # its body, a string with its quotes
    "request_end",
    "max_tokens",
    "max_completion_tokens",
    "ignore_eos",
    "error_at",
    "error_end",
    "hashes_at",  # place of the first hash of its prompt among those of this call
    "hashes",
    "prompt",  # its digest; for the caller to number
    "prompt_at",  # in the body without escapes, as all that follows
    "prompt_end",
    "model_at",
    "model_end",
    "tools_at",
    "tools_end",
    "cache_salt_at",
    "cache_salt_end",
    "messages_at",
    "messages_end",
)
_FIELD = {name: place for place, name in enumerate(FIELDS)}
_, _BEGIN, _END, _TAKEN, _DIGEST, _START_US, _END_US, _FIRST_US, _STAMPS_AT, _STAMPS = range(10)
_INFO_TIMES, _TOKEN_TIMES, _CHUNK_TIMES, _FREE, _REQUEST = (
    _FIELD[name] for name in ("info_times_at", "token_times_at", "chunk_times_at", "free_at", "request_at")
)
_HASHES_AT, _HASHES, _PROMPT_DIGEST, _PROMPT, _MESSAGES = (
    _FIELD[name] for name in ("hashes_at", "hashes", "prompt", "prompt_at", "messages_at")
)

# What to do with a value; a nested object may be null where that says so.
_SKIP, _TIME, _COUNT, _TIMES, _TRUTH, _SPAN, _BODY, _OBJECT, _OBJECT_OR_NULL = range(9)
_RECORD, _INFO, _RESPONSE, _USAGE, _DETAILS, _IN_BODY = range(6)
# Object -> key -> what to do, and the field it fills or the object it is.
_PLAN: dict[int, dict[str, tuple[int, str | int]]] = {
    _RECORD: {
        "start_time": (_TIME, "start_us"),
        "end_time": (_TIME, "end_us"),
        "info": (_OBJECT, _INFO),
        "request": (_BODY, "request_at"),
        "error": (_SPAN, "error_at"),
    },
    _INFO: {
        "input_tokens": (_COUNT, "input_tokens"),
        "output_tokens": (_COUNT, "info_output_tokens"),
        "output_token_times": (_TIMES, "info_times_at"),
        "response_info": (_OBJECT_OR_NULL, _RESPONSE),
        "response_metrics": (_OBJECT_OR_NULL, _RESPONSE),
    },
    _RESPONSE: {
        "output_tokens": (_COUNT, "output_tokens"),
        "output_token_times": (_TIMES, "token_times_at"),
        "chunk_times": (_TIMES, "chunk_times_at"),
        "server_usage": (_OBJECT_OR_NULL, _USAGE),
    },
    _USAGE: {
        "prompt_tokens": (_COUNT, "usage_prompt_tokens"),
        "completion_tokens": (_COUNT, "usage_completion_tokens"),
        "prompt_tokens_details": (_OBJECT_OR_NULL, _DETAILS),
    },
    _DETAILS: {"cached_tokens": (_COUNT, "cached_tokens")},
    _IN_BODY: {
        "model": (_SPAN, "model_at"),
        "prompt": (_SPAN, "prompt_at"),
        "messages": (_SPAN, "messages_at"),
        "tools": (_SPAN, "tools_at"),
        "cache_salt": (_SPAN, "cache_salt_at"),
        "max_tokens": (_COUNT, "max_tokens"),
        "max_completion_tokens": (_COUNT, "max_completion_tokens"),
        "ignore_eos": (_TRUTH, "ignore_eos"),
    },
}
_PARENT = np.array([-1, _RECORD, _INFO, _RESPONSE, _USAGE, -1])
_KEYS = sorted({key for members in _PLAN.values() for key in members})
_NAMES, _LENGTHS, _TABLE = names_of(_KEYS)
# By object and key; one more key, for all others, is skipped.
_ACTION = np.full((len(_PLAN), len(_KEYS) + 1), _SKIP)
_TARGET = np.zeros_like(_ACTION)
_MARK = np.zeros_like(_ACTION)  # a bit for each member, none for what is skipped
_REQUIRED = np.zeros(len(_PLAN), np.int64)
for _object, _members in _PLAN.items():
    for _key, (_action, _target) in _members.items():
        _at = _object, _KEYS.index(_key)
        _ACTION[_at] = _action
        _TARGET[_at] = _FIELD[_target] if isinstance(_target, str) else _target
        _MARK[_at] = 1 << np.count_nonzero(_MARK)
        _REQUIRED[_object] |= _MARK[_at] if _key in ("start_time", "end_time", "info") else 0

_LARGEST_S = float(1 << 61) / 1e6
_UNESCAPED = np.zeros(256, np.uint8)  # what a letter behind a backslash stands for
for _letter, _meant in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True):
    _UNESCAPED[ord(_letter)] = ord(_meant)

# Why a scan ended: the content did, there is no room for more rows, or something stands where a record should.
MORE, FULL, OTHER = range(3)


@entry
def scan_records(
    text: Bytes,
    words: Words,
    at: int,
    end: int,
    rows: Int64s,
    stamps: Int64s,
    hashes: Hashes,
    body: Bytes,
    body_words: Words,
) -> tuple[int, int, int, int]:
    """``(why it ended, where, rows filled, stamps filled)``: the records from ``at`` on, with commas between them.

    ``stamps``: room for half as many as ``text`` has bytes; ``hashes``: for one in 16; ``body``: for
    a body without escapes, as large as ``text``.
    """
    count, used, hashed = 0, 0, 0
    while True:
        before = at
        at = after_space(text, at)
        while text[at] == COMMA:
            at = after_space(text, at + 1)
        if at >= end:
            return MORE, before, count, used
        if text[at] != OPEN_BRACE and text[at] != OPEN_BRACKET:
            return OTHER, before, count, used
        if count == len(rows):
            return FULL, before, count, used
        row = rows[count]
        for field in range(len(row)):
            row[field] = -1
        row[_FREE] = used
        stop = _object_at(text, words, at, _RECORD, row, stamps)
        if stop >= 0 and not (_in_order(row, stamps) and _with_body(text, words, row, stamps, body, body_words)):
            stop = UNUSUAL
        if stop >= 0:
            hashed = _with_prompt(body_words, row, hashes, hashed)
        row[_TAKEN] = stop >= 0
        if stop < 0:
            stop = after_brackets(text, at, end)
            if stop < 0:
                return MORE, before, count, used
            row[_FREE] = used
        row[_BEGIN], row[_END], row[_DIGEST] = at, stop, digest(words, at, stop)
        used = row[_FREE]
        count += 1
        at = stop


@entry
def digest_of(words: Words, end: int) -> int:
    """The hash of a record, the first ``end`` bytes, as ``scan_records`` has it."""
    return digest(words, 0, end)


@compiled
def _in_order(row: Any, stamps: Any) -> bool:
    """Whether nothing is before the start; settles which list holds the stamps."""
    row[_STAMPS] = 0
    for field in (_INFO_TIMES, _TOKEN_TIMES, _CHUNK_TIMES):
        if row[field + 1] > 0:
            row[_STAMPS_AT], row[_STAMPS], row[_FIRST_US] = row[field], row[field + 1], stamps[row[field]]
    earliest = row[_END_US]
    for place in range(row[_STAMPS_AT], row[_STAMPS_AT] + row[_STAMPS]):
        earliest = min(earliest, stamps[place])
    return row[_START_US] <= earliest


@compiled
def _microseconds(text: Bytes, at: int) -> tuple[int, int]:
    mantissa, decimals, at = decimal(text, at)
    if at < 0:
        return 0, UNUSUAL
    seconds = as_double(mantissa, decimals)
    if not seconds < _LARGEST_S:
        return 0, UNUSUAL
    whole_us: Any = np.int64(np.rint(seconds * 1e6))
    return whole_us, at


@compiled
def _times(text: Bytes, at: int, stamps: Any, row: Any, field: int) -> int:
    """The end of a list of stamps or ``null``; its place and length go to ``field`` and the one after it."""
    row[field], row[field + 1] = row[_FREE], 0
    if text[at] != OPEN_BRACKET:
        return after_null(text, at)
    at = after_space(text, at + 1)
    place = row[_FREE]
    while text[at] != CLOSE_BRACKET:
        stamps[place], at = _microseconds(text, at)
        if at < 0:
            return UNUSUAL
        place += 1
        at = next_member(text, at, CLOSE_BRACKET)
        if at < 0:
            return UNUSUAL
    row[field + 1], row[_FREE] = place - row[_FREE], place
    return at + 1


@compiled
def _object_at(text: Bytes, words: Words, at: int, top: int, row: Any, stamps: Any) -> int:
    """The end of an object of the plan whose numbers are now in ``row``."""
    if text[at] != OPEN_BRACE:
        return UNUSUAL
    at = after_space(text, at + 1)
    inside, entered, seen = top, 0, 0
    while True:
        if text[at] == CLOSE_BRACE:
            at += 1
            if inside == top:
                return at if seen & _REQUIRED[top] == _REQUIRED[top] else UNUSUAL
            inside = _PARENT[inside]
        else:
            key, at = _member(text, words, at)
            if at < 0:
                return UNUSUAL
            action = _ACTION[inside, key]  # of a key that is none of the plan's: the last one, to skip
            target = _TARGET[inside, key]
            if seen & _MARK[inside, key]:
                return UNUSUAL
            seen |= _MARK[inside, key]
            if action >= _OBJECT and text[at] == OPEN_BRACE:
                if entered >> target & 1:
                    return UNUSUAL
                inside, entered = target, entered | 1 << target
                at = after_space(text, at + 1)
                continue
            at = _value(text, words, at, action, target, row, stamps)
            if at < 0:
                return UNUSUAL
        at = next_member(text, at, CLOSE_BRACE)
        if at < 0:
            return UNUSUAL


@compiled
def _member(text: Bytes, words: Words, at: int) -> tuple[int, int]:
    """``(number of the key, where its value starts)``."""
    if text[at] != QUOTE:
        return -1, UNUSUAL
    key, at = name_at(words, at + 1, _NAMES, _LENGTHS, _TABLE)
    return key, after_colon(text, at) if at >= 0 else UNUSUAL


@compiled
def _value(text: Bytes, words: Words, at: int, action: int, target: int, row: Any, stamps: Any) -> int:
    """The end of a value with which was done what the plan says."""
    if action == _TIMES:
        return _times(text, at, stamps, row, target)
    if action == _TIME:
        row[target], at = _microseconds(text, at)
        return at
    if action == _COUNT:
        row[target], at = integer(text, at)
        return at
    if action == _TRUTH:
        row[target], at = _truth(text, at)
        return at
    if action == _OBJECT:
        return UNUSUAL
    if action == _OBJECT_OR_NULL:
        return after_null(text, at)
    end = after_value(text, words, at)
    if action == _BODY and text[at] != QUOTE:
        return after_null(text, at)
    if action != _SKIP and end >= 0 and text[at] != NULL_LETTER:
        row[target], row[target + 1] = at, end
    return end


@compiled
def _truth(text: Bytes, at: int) -> tuple[int, int]:
    """``(1, 0 or -1 for null, end)`` of a truth value."""
    end = after_true(text, at)
    if end >= 0:
        return 1, end
    end = after_false(text, at)
    return (0, end) if end >= 0 else (-1, after_null(text, at))


@compiled
def _with_body(text: Bytes, words: Words, row: Any, stamps: Any, body: Bytes, body_words: Words) -> bool:
    """Whether the request's body is an object, whose numbers are now in ``row``, or there is none."""
    if row[_REQUEST] < 0:
        return True
    length = _unescaped(text, words, row[_REQUEST] + 1, row[_REQUEST + 1] - 1, body)
    if length <= 0:
        return length == 0
    end = _object_at(body, body_words, after_space(body, 0), _IN_BODY, row, stamps)
    return end >= 0 and after_space(body, end) == length


@compiled
def _with_prompt(body_words: Words, row: Any, hashes: Any, place: int) -> int:
    """Hash the prompt of the body, or its messages, if it has any; where further hashes go."""
    row[_HASHES_AT], row[_HASHES] = place, 0
    if row[_REQUEST] < 0:
        return place
    if row[_PROMPT] < 0:
        row[_PROMPT], row[_PROMPT + 1] = row[_MESSAGES], row[_MESSAGES + 1]
    if row[_PROMPT] < 0:
        return place
    row[_PROMPT_DIGEST] = prompt_hashes(body_words, row[_PROMPT:_MESSAGES], hashes, place)
    row[_HASHES] = (row[_PROMPT + 1] - row[_PROMPT]) >> 4
    return place + row[_HASHES]


@compiled
def _unescaped(text: Bytes, words: Words, at: int, end: int, body: Bytes) -> int:
    """How long a string is without its escapes, in UTF-8."""
    length = 0
    while at < end:
        if is_plain_word(words, at) and at + 8 <= end:
            for letter in range(8):
                body[length + letter] = text[at + letter]
            at, length = at + 8, length + 8
            continue
        byte = text[at]
        if byte >= BEYOND_ASCII:
            return UNUSUAL
        if byte == BACKSLASH:
            byte = _UNESCAPED[text[at + 1]]
            at += 1
            if byte == 0:
                length, at = put_escaped(text, at - 1, body, length)
                if body[length - 1] == 0:
                    return UNUSUAL
                continue
        body[length] = byte
        length += 1
        at += 1
    for place in range(length, length + PADDING_BYTES):
        body[place] = 0
    return length
