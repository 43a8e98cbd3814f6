"""Any simulator as a command: it reads a table of requests, and answers with TTFT and E2E of each.

The command is run with the path of a folder as its last argument.  In the folder it finds ``requests.csv``,
``engine.json`` and ``coefficients.yaml``; it leaves ``simulator.json`` and ``results.csv`` there.
``docs/compare.md`` has the columns, and a simulator of twenty lines.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReleaseError, ReplayError, printable
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.kernel.state import BATCH
from blis_replay.blis.latency.datasheets import architecture_named, config_of
from blis_replay.blis.latency.models import Latency, durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release
from blis_replay.blis.trace import KvCacheGroup, RequestTrace
from blis_replay.ingest.recording import Recording
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.program import ended, last_line, left_by, run_captured
from blis_replay.replay.simulator import Simulated, entry_of, model_of

PREFIX = "cmd:"
DEFAULT_TIMEOUT_S = 600.0
REQUESTS, _ENGINE, _COEFFICIENTS = "requests.csv", "engine.json", "coefficients.yaml"
_CONFIG, _STEP_TIMES = "config.json", "step_times.csv"
HEADER, RESULTS = "simulator.json", "results.csv"
_COLUMNS = ("request_index", "ttft_us", "e2e_us")
_SCHEDULED = "scheduled_us"
# Largest answer: a page for the header, one line per request for the results.
_HEADER_BYTES, _LINE_BYTES = 100_000, 200
_MOST_NAMES, _MOST_CHARACTERS = 50, 200
_FOREVER_US = 1e15  # thirty years
# Between two tokens of a request, the median: no server is as fast as 30 us, nor one as slow as 5 s.  A GPU takes some
# 3 to 60 ms, so seconds, milliseconds and nanoseconds lie beyond.
_LEAST_GAP_US, _MOST_GAP_US = 30, 5e6


class CommandError(ReplayError):
    """A simulator that was named as a command cannot be run, failed, hung, or answered nonsense."""


@dataclass(frozen=True)
class CommandSimulator:
    """A command as a simulator.

    ``words``: program and arguments.  ``release``: the coefficients that it gets.  ``label``: its name, if not the
    command.
    """

    words: tuple[str, ...]
    release: CoefficientRelease
    timeout_s: float = DEFAULT_TIMEOUT_S
    reports_steps: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """The name in answers: ``cmd:``, program and arguments, so that scripts of one interpreter differ."""
        if self.label:
            return self.label
        return PREFIX + printable(" ".join([Path(self.words[0]).name, *self.words[1:]]))[:_MOST_CHARACTERS]

    def entry_for(self, recording: Recording) -> ModelEntry | None:
        """None: the command reads the coefficients itself."""
        del recording
        return None

    def serve(self, plan: ReplayPlan) -> Simulated:
        """Replay the plan; raises ``CommandError`` for whatever goes wrong with the command."""
        if plan.teacher_forced:
            raise CommandError(f"{self.name}: observed times cannot be forced on a command; use --simulator embedded")
        with tempfile.TemporaryDirectory(prefix="blis-replay-") as folder:
            place = Path(folder)
            _write(place, plan, self.release)
            peak_bytes = self._run(place)
            header = self._header(place / HEADER)
            answers = self._results(place / RESULTS, plan.trace.output_tokens)
        name, lacks, fitted_on = header
        lacking = tuple(f"{name} does not model: {what}" for what in lacks)
        return replace(
            answers,
            output_tokens=plan.trace.output_tokens,
            differences=(*lacking, *answers.differences),
            peak_bytes=peak_bytes,
            fitted_on=fitted_on,
        )

    def _run(self, place: Path) -> int:
        """Run the command in its folder; its largest memory in bytes."""
        words, named = [*self.words, str(place)], (self.name, "give a program as cmd:PATH")
        end, errors = run_captured(words, Path.cwd(), self.timeout_s, named, CommandError, both=False)
        if end.code:
            said = last_line(errors)
            raise CommandError(f"{self.name} {ended(end.code)}: {said}; run it by hand on a folder of its own")
        return end.peak_bytes

    def _bytes(self, path: Path, most: int) -> bytes:
        """The content of a file that the command wrote; ``CommandError`` if it is missing or too long."""
        content = left_by(path, most)
        if content is None:
            raise CommandError(f"{self.name} wrote no {path.name}; write it into the folder that is its last argument")
        if len(content) > most:
            raise CommandError(f"{self.name}: {path.name} has more than {most:,} bytes; write one line per request")
        return content

    def _header(self, path: Path) -> tuple[str, tuple[str, ...], tuple[str, ...] | None]:
        """Name with version, the names of what it does not model, and what it was fitted on, if it says so."""
        try:
            header: Any = json.loads(self._bytes(path, _HEADER_BYTES))
            named = [str(header[key])[:_MOST_CHARACTERS] for key in ("name", "version")]
            not_modelled, stated = header["not_modelled"], header.get("fitted_on")
            if not (isinstance(not_modelled, list) and isinstance(stated, list | None)):
                raise TypeError  # a text would be read letter by letter
            lacking = [str(what)[:_MOST_CHARACTERS] for what in not_modelled[:_MOST_NAMES]]
            fitted_on = None if stated is None else tuple(map(str, stated))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CommandError(
                f'{self.name}: {path.name} is not {{"name": TEXT, "version": TEXT, "not_modelled": [TEXT, ...], '
                '"fitted_on": [TEXT, ...]}; write that'
            ) from None
        return printable(" ".join(named)), tuple(map(printable, lacking)), fitted_on

    def _results(self, path: Path, output_tokens: Int64s) -> Simulated:
        """The answers in us; requests without a row are not completed.  ``output_tokens``: int64[requests]."""
        requests = len(output_tokens)
        content = self._bytes(path, (requests + 1) * _LINE_BYTES)
        try:
            table = pl.read_csv(content, infer_schema=False)
            read = table.select(pl.col(name).cast(pl.Float64) for name in _COLUMNS)
            scheduled = table[_SCHEDULED].cast(pl.Float64) if _SCHEDULED in table.columns else None
        except (pl.exceptions.PolarsError, ValueError):
            raise CommandError(
                f"{self.name}: {path.name} is not a table of {', '.join(_COLUMNS)} in numbers; "
                "write one line per request"
            ) from None
        rows = read.drop_nulls().to_numpy()
        index, ttft_us, e2e_us = rows.T
        wrong = _wrong(index, ttft_us, e2e_us, output_tokens)
        if wrong or len(rows) < len(read):
            raise CommandError(
                f"{self.name}: {path.name}: {wrong or 'a cell is empty'}; leave out what did not complete"
            )
        completed = np.zeros(requests, np.bool_)
        answers = np.zeros((3, requests), np.int64)
        place = index.astype(np.int64)
        completed[place] = True
        answers[:2, place] = np.rint([ttft_us, e2e_us]).astype(np.int64)
        unknown = len(rows) if scheduled is None else scheduled.null_count()
        partly_reported: tuple[str, ...] = ()
        if 0 < unknown < len(rows):
            told = f"{len(rows) - unknown:,} of {len(rows):,} requests"
            partly_reported = (f"{_SCHEDULED} is told of {told}, and used only if of all",)
        if scheduled is not None and not unknown:
            scheduled_us = scheduled.to_numpy()
            if not ((scheduled_us >= 0) & (scheduled_us <= ttft_us)).all():
                raise CommandError(
                    f"{self.name}: {path.name}: {_SCHEDULED} is not between the send and the first token; leave it out"
                )
            answers[2, place] = np.rint(scheduled_us).astype(np.int64)
        return Simulated(
            completed=completed,
            ttft_us=answers[0],
            e2e_us=answers[1],
            output_tokens=np.zeros(requests, np.int64),
            scheduled_us=None if unknown else answers[2],
            differences=partly_reported,
        )


def command_simulator(text: str, release: CoefficientRelease, timeout_s: float) -> CommandSimulator:
    """The simulator of ``cmd:PATH ARGS``; raises ``CommandError`` if the program is missing."""
    try:
        words = shlex.split(text.removeprefix(PREFIX))
    except ValueError as error:
        raise CommandError(f"{text}: {error}; quote it as in a shell") from None
    if not words:
        raise CommandError("cmd: names no program; give --simulator 'cmd:PATH ARGS'")
    found = shutil.which(words[0])
    if found is None:
        raise CommandError(f"{words[0]}: no such program; give --simulator 'cmd:PATH ARGS'")
    return CommandSimulator((str(Path(found).absolute()), *words[1:]), release, timeout_s)


def _write(place: Path, plan: ReplayPlan, release: CoefficientRelease) -> None:
    """Write the inputs: requests in order of arrival, engine arguments of the replay, coefficients."""
    recording, trace, engine = plan.recording, plan.trace, plan.engine
    columns = {
        "request_index": np.arange(len(trace.arrival_us)),
        "arrival_us": trace.arrival_us,
        "prompt_tokens": trace.prompt_tokens,
        # Prompt tokens that no prefix cache holds, where that was recorded; else all.
        "prefill_tokens": trace.prefill_tokens,
        "output_tokens": trace.output_tokens,
        # Ids of the prompt's full blocks; equal ids mean equal tokens up to the end of that block.
        "prefix_blocks": _prefix_blocks(trace),
    }
    pl.DataFrame(columns).write_csv(place / REQUESTS)
    arguments = {
        name: setting.value
        for name, setting in recording.engine.items()
        if isinstance(setting.value, str | int | float)
    }
    of_replay = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_gpu_blocks")
    arguments |= {name: getattr(engine, name) for name in (*of_replay, "async_scheduling", "scheduling_policy")}
    served: dict[str, Any] = {"model": model_of(recording), "hardware": recording.hardware}
    served["tensor_parallelism"] = recording.tensor_parallelism
    (place / _ENGINE).write_text(json.dumps(served | {"arguments": arguments}, indent=1), "utf-8")
    (place / _COEFFICIENTS).write_text(format_release(release), "utf-8")
    architecture = architecture_named(model_of(recording))
    if architecture is not None:
        (place / _CONFIG).write_text(json.dumps(config_of(architecture), indent=1), "utf-8")
    if has_entry(release, recording):
        table = step_times(
            entry_of(release, recording).latency,
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            engine.kv_cache_groups,
        )
        table.write_csv(place / _STEP_TIMES)


def _prefix_blocks(trace: RequestTrace) -> list[str]:
    keys = trace.block_keys
    if keys is None:
        return [""] * len(trace)
    count = np.minimum(keys.count, trace.prompt_tokens // keys.block_size)
    return [" ".join(map(str, keys.keys[at : at + n].tolist())) for at, n in zip(keys.start, count, strict=True)]


_STEP_REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_STEP_CONTEXTS = (1, 64, 256, 512, 1024, 2048, 4096, 8192)
_PREFILL_CONTEXTS = (0, 512, 2048, 8192)
_STEP_PREFILLS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def step_times(
    latency: Latency, most_tokens: int, most_requests: int, groups: tuple[KvCacheGroup, ...] = ()
) -> pl.DataFrame:
    """The step times of a release as a table: steps of one prefill, and steps of decodes only.

    ``prefill_context_tokens``: prompt tokens computed before; ``context_tokens``: of all decodes together;
    ``duration_us``: whole us.  ``groups``: of layers that attend to a part of them.
    """
    prompts = _up_to(most_tokens, _STEP_PREFILLS)
    rows = [(tokens, cached, 0, 0) for tokens in prompts for cached in _PREFILL_CONTEXTS]
    rows += [
        (0, 0, count, count * context) for count in _up_to(most_requests, _STEP_REQUESTS) for context in _STEP_CONTEXTS
    ]
    tokens, cached, count, context = np.array(rows, np.int64).T
    batches = np.zeros(len(rows), BATCH)
    batches["prefill_tokens"], batches["prefill_requests"], batches["decode_tokens"] = tokens, tokens > 0, count
    batches["attended_tokens"] = np.rint(attended_by(groups, cached, tokens))
    batches["context_tokens"] = np.rint(count * attended_by(groups, context // np.maximum(count, 1) - 1, 1))
    names = ("prefill_tokens", "prefill_context_tokens", "decode_requests", "context_tokens")
    table = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")
    return table.with_columns(duration_us=pl.Series(durations_us(latency, batches).astype(np.int64)))


def _up_to(most: int, grid: Sequence[int]) -> list[int]:
    """The values of a grid below the limit, and the limit; at least two values."""
    return sorted({*grid[:2], *(value for value in grid if value < most), most})


def _wrong(index: Any, ttft_us: Any, e2e_us: Any, output_tokens: Int64s) -> str:
    """What is impossible in such an answer, ``""`` if nothing."""
    requests = len(output_tokens)
    if not len(index):
        return "no request was completed"
    if ((index < 0) | (index >= requests) | (index != np.floor(index))).any():
        return f"a request_index that is not among 0 to {requests - 1:,}"
    if len(np.unique(index)) < len(index):
        return "a request has two lines"
    if not (np.isfinite(ttft_us) & np.isfinite(e2e_us) & (ttft_us >= 0) & (e2e_us < _FOREVER_US)).all():
        return "a time that is not a number from 0 on"
    if (e2e_us < ttft_us).any():
        return "a request ends before its first token"
    gaps, gap_us = output_tokens[index.astype(np.int64)] - 1, min(e2e_us.max(), _MOST_GAP_US)  # a queue may be long
    if (gaps > 0).any():
        gap_us = np.median((e2e_us - ttft_us)[gaps > 0] / gaps[gaps > 0])
    if not _LEAST_GAP_US <= gap_us <= _MOST_GAP_US:
        return f"a token takes {gap_us:g} us: times are in us"
    return ""


def has_entry(release: CoefficientRelease, recording: Recording) -> bool:
    """Whether a release has coefficients for a recording."""
    try:
        entry_of(release, recording)
    except ReleaseError:
        return False
    return True
