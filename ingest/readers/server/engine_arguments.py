"""The engine arguments of vLLM that a recording keeps: their names, and what a value of each can be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from msgspec import convert

from blis_replay.base.document import yaml_values
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import MAX_TOKENS, finite, quoted, switch, text, tokens, whole

Argument = int | float | bool | str

_DECIMAL = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?", re.ASCII)
_MAX_POSITIONS = 64  # draft tokens of a step
_ENUM_MEMBER = re.compile(r"<\w{1,80}\.(\w{1,80}): [^>]*>")  # how Python prints one
# Names of one data type; "auto" is whatever the model's own files say.
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": None}


def _cache_dtype(raw: object) -> str:
    """A data type without the name of the library; ``auto`` stays."""
    return (text(raw) or "auto").lower().removeprefix("torch.")


def _dtype(raw: object) -> str | None:
    """A data type as vLLM names it, or the quantization of the weights (``fp8``)."""
    name = _cache_dtype(raw)
    return _DTYPES.get(name, name)


def _printed(raw: object) -> str | None:
    """A value of any kind in short: sizes as ``1 2 4 8..512/8``, a mapping as ``method=eagle3 ...``."""
    if isinstance(raw, Mapping):
        said = (f"{key}={value}" for key, value in raw.items() if value is not None and not isinstance(value, dict))
        return text(" ".join(said)) or "given"
    if isinstance(raw, list):
        numbers = sorted({number for number in map(whole, raw) if number is not None})
        return text(_runs(numbers) if len(numbers) == len(raw) else " ".join(map(str, raw))) or "none"
    if not isinstance(raw, str | int | float):
        return None
    member = _ENUM_MEMBER.fullmatch(str(raw))
    return text(member[1] if member else str(raw))


def _runs(numbers: list[int]) -> str:
    """Ascending numbers, four and more with one gap as ``first..last/gap``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (len(runs[-1]) == 1 or number - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(number)
        elif runs and len(runs[-1]) == 2:  # no gap yet
            runs[-1:] = [runs[-1][:1], [runs[-1][1], number]]
        else:
            runs.append([number])
    said = (f"{run[0]}..{run[-1]}/{run[1] - run[0]}" if len(run) > 3 else " ".join(map(str, run)) for run in runs)
    return " ".join(said)


def _shares(raw: object) -> str | None:
    """Shares from 0 to 1 by position, none above the one before, as text with blanks between them."""
    listed = raw.split() if isinstance(raw, str) else raw if isinstance(raw, list) else [raw]
    shares = [finite(float(str(item))) if _DECIMAL.fullmatch(str(item)) else None for item in listed[:_MAX_POSITIONS]]
    known = [share for share in shares if share is not None and 0 <= share <= 1]
    falling = known == sorted(known, reverse=True)
    return " ".join(f"{share:g}" for share in known) if known and falling and len(known) == len(listed) else None


@dataclass(frozen=True)
class Kind:
    """What an argument's values are: how one is read (None: it is not usable), and how it is asked for."""

    read: Callable[[object], Argument | None]
    expected: str


KINDS = {
    "count": Kind(tokens, f"a positive whole number below {MAX_TOKENS:,}"),
    "count or zero": Kind(whole, "a whole number"),
    "share": Kind(
        lambda raw: share if (share := finite(raw)) is not None and 0 <= share < 1 else None,
        "a number from 0 to below 1",
    ),
    "switch": Kind(switch, "true or false"),
    "word": Kind(lambda raw: text(str(raw)) if isinstance(raw, str | float) else None, "a text"),
    "dtype": Kind(_dtype, "a text"),
    "cache dtype": Kind(_cache_dtype, "a text"),
    "anything": Kind(_printed, "a text"),
    "acceptance": Kind(_shares, "a share from 0 to 1 for each position, none above the one before: [0.7, 0.4]"),
}
_LISTED = yaml_values(Path(__file__).with_suffix(".yaml").read_text("utf-8"), "engine_arguments.yaml", ValueError)
_NAMES: dict[str, list[str]] = convert(_LISTED, dict[str, list[str]])
ARGUMENTS = {name: kind for word, kind in KINDS.items() for name in _NAMES[word]}
_IGNORED = frozenset(_NAMES["ignored"])
# What vLLM calls the same in other places: its flags, its tools, its records.
_SAME = {
    "num_gpu_blocks_override": "num_gpu_blocks",
    "tensor_parallelism": "tensor_parallel_size",
    "vllm": "vllm_version",
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "max_seq_len": "max_model_len",
}


def argument_named(name: str) -> str:
    """The argument that a name means: ``--max-num-seqs`` and ``max_num_seqs`` are the same."""
    plain = name.strip().lstrip("-").replace("-", "_")
    return _SAME.get(plain, plain)


def checked_arguments(path: Path, given: Mapping[str, object], also: tuple[str, ...] = ()) -> dict[str, Argument]:
    """Values by argument that someone wrote down, those left out that change no schedule.

    Raises :class:`RecordingError` for an unknown name, with the nearest one (of the arguments, or ``also``), and for a
    value of the wrong kind.
    """
    arguments: dict[str, Argument] = {}
    for written, raw in given.items():
        name = argument_named(written)
        if name in _IGNORED:
            continue
        if name not in ARGUMENTS:
            near = get_close_matches(name, [*also, *ARGUMENTS, *_IGNORED], 1)
            remedy = (
                f"did you mean {near[0]}?" if near else f"remove it, or use one of {', '.join([*ARGUMENTS][:10])}, ..."
            )
            raise RecordingError(path, f"field {written[:60]}", "not an engine argument of vLLM 0.11 to 0.32", remedy)
        if name == "dtype" and raw == "auto":
            continue
        value = ARGUMENTS[name].read(raw)
        if value is None:
            expected = f"give {ARGUMENTS[name].expected}"
            raise RecordingError(path, f"field {written[:60]}", f"{quoted(raw)} is not usable", expected)
        if arguments.get(name, value) != value:
            problem = f"{name} is given twice, as {quoted(arguments[name])} and {quoted(value)}"
            raise RecordingError(path, f"field {written[:60]}", problem, "give it once")
        arguments[name] = value
    return arguments
