"""The types of adapters: their inputs, their answers, and what each says about itself."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

US_PER_MS = 1_000.0


class AdapterError(Exception):
    """What an adapter cannot do; one line for the user."""


class Answer(NamedTuple):
    """Times of one request in us from its send; ``scheduled_us`` is None where the simulator does not report it."""

    request_index: int
    ttft_us: float
    e2e_us: float
    scheduled_us: float | None


@dataclass(frozen=True)
class Inputs:
    """Inputs of a replay: one dict of integers per request, and ``served``, which is ``engine.json``.

    ``blocks``: per request the ids of its prompt's full blocks, empty where no prefix is known.
    """

    folder: Path
    requests: list[dict[str, int]]
    blocks: list[list[int]]
    served: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments by vLLM's names."""
        found: dict[str, Any] = self.served["arguments"]
        return found

    @property
    def model(self) -> str:
        """A folder with the model's ``config.json`` where its dimensions are known, else its name."""
        return str(self.folder) if (self.folder / "config.json").exists() else str(self.served["model"])

    def gpu_of(self, names: Iterable[tuple[str, str]]) -> str:
        """A simulator's name of the GPU, by the first part that ours contains; raises ``AdapterError`` if none."""
        words = str(self.served["hardware"] or "").lower()
        for part, name in names:
            if part in words:
                return name
        raise AdapterError(f"no system is known for the hardware {self.served['hardware']!r}")


@dataclass(frozen=True)
class Adapter:
    """A simulator of others.

    ``package``: its name on PyPI, ``""`` for none.  ``tried``: the version that the mapping was made with.  ``lacks``:
    what it does not model.  ``run``: makes the answers from the inputs and an option.  ``fitted``: the option with
    which it takes our coefficients.
    """

    name: str
    package: str
    tried: str
    lacks: tuple[str, ...]
    run: Callable[[Inputs, str], Iterator[Answer]]
    fitted: str = ""


# What is kept of a program's output: its beginning, and the end with its last words.
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 1 << 16


def run_to_end(words: Sequence[str], what: str, **settings: Any) -> str:
    """Run a program to its end; the first 1 MB that it printed.

    Raises ``AdapterError`` with its last words if it fails.
    """
    with TemporaryFile() as output, TemporaryFile() as errors:
        settings |= {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        done = subprocess.run(words, check=False, **settings)  # noqa: S603 (no shell)
        if done.returncode:
            lines = (_tail(output) + _tail(errors)).splitlines()
            said = [line for line in lines if line.strip()] or ["it said nothing"]
            raise AdapterError(f"{what}: {said[-1].strip()}")
        output.seek(0)
        return output.read(_HEAD_BYTES).decode("utf-8", "replace")


def _tail(file: IO[bytes]) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    return file.read().decode("utf-8", "replace")


@dataclass(frozen=True)
class StepTimes:
    """The step times of the coefficients, in us; all grids rise.

    ``decode_us``: by mean context and number of decodes.  ``prefill_us``: by tokens computed before and prompt tokens
    (the first is 0), what the prompt tokens add to a step, without its fixed part.
    """

    decodes: list[int]
    contexts: list[int]
    decode_us: list[list[int]]
    prefill_tokens: list[int]
    prefill_contexts: list[int]
    prefill_us: list[list[int]]


def step_times(inputs: Inputs) -> StepTimes:
    """The step times in the folder; raises ``AdapterError`` if the coefficients have none for this recording."""
    table = inputs.folder / "step_times.csv"
    if not table.exists():
        raise AdapterError("the coefficients have no step times for this recording; ask it without them")
    with table.open(encoding="utf-8") as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    decode_us = {(row["decode_requests"], row["context_tokens"]): row["duration_us"] for row in rows}
    decodes = sorted({count for count, _ in decode_us if count})
    contexts = sorted({tokens // count for count, tokens in decode_us if count})
    alone_us = decode_us[decodes[0], decodes[0] * contexts[0]]
    prompts = [row for row in rows if row["prefill_tokens"]]
    added_us = {
        (row["prefill_context_tokens"], row["prefill_tokens"]): max(row["duration_us"] - alone_us, 0) for row in prompts
    }
    before, tokens = (sorted(set(of)) for of in zip(*added_us, strict=True))
    return StepTimes(
        decodes,
        contexts,
        [[decode_us[count, count * context] for count in decodes] for context in contexts],
        [0, *tokens],
        before,
        [[0, *(added_us[cached, count] for count in tokens)] for cached in before],
    )
