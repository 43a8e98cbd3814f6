"""The step log that ``blis-replay record`` has a server write: every engine step and every arrival (docs/record.md).

The first line is a header, each other one an array that begins with its kind.  Times are ns of the monotonic clock
since the header's ``started``.  A log that breaks off is read as far as it goes; every member of it ends with counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import polars as pl

from blis_replay.base.errors import counted
from blis_replay.ingest.readers.documents import DECODE_ERRORS, section, text, tokens, whole
from blis_replay.ingest.readers.engine_state import Arrival, Engine, Step, numbers_of, pairs_of
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp.journeys import EVENT_SCHEMA, READ_LIFECYCLE_SCHEMA, Journeys
from blis_replay.ingest.readers.otlp.spans import READ_STEP_SCHEMA
from blis_replay.ingest.readers.requests import RawPrompts
from blis_replay.ingest.recording import SERVER_BLOCKS, SNAPSHOT_SCHEMA
from blis_replay.ingest.rows import BATCH_ROWS, Schema
from blis_replay.ingest.rows import Rows as StoredRows
from blis_replay.ingest.scratch import Scratch

FORM = 1
MAX_LINE_BYTES = 16 << 20
_HEAD = b'{"blis_replay_steps":'
_LINE = msgspec.json.Decoder(list[Any])
_HEADER = msgspec.json.Decoder(dict[str, Any])
_COMPARED = ("steps", "arrivals", "finished", "scheduled_tokens")
_COUNTERS = (*_COMPARED, "dropped", "wrapper_ns", "writer_ns")
_BROKEN = (*DECODE_ERRORS, ValueError, TypeError, LookupError)


@dataclass(frozen=True)
class StepLog:
    """What the logs of one engine hold, in the forms of a trace's steps and journeys.

    ``steps``: ``READ_STEP_SCHEMA``; ``snapshots``: ``SNAPSHOT_SCHEMA``, of prefills alone.  ``settings``: engine
    arguments as the scheduler had them.  ``prompts``: one per journey, by the server's block hashes, None without
    those.  ``measured``: what the log says of itself and what was counted.  ``remarks``: what is missing or odd, in
    words.  ``features``: as in ``RequestsRead``.
    """

    steps: StoredRows
    snapshots: StoredRows
    journeys: Journeys
    settings: Mapping[str, object]
    model: str | None
    prompts: RawPrompts | None
    measured: dict[str, float | int | str | None]
    remarks: tuple[str, ...]
    features: tuple[str, ...]


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a step log."""
    return head.startswith(_HEAD)


def read_step_log(files: Sequence[RecordedFile], scratch: Scratch) -> StepLog | None:
    """The last start of the first engine among ``files``; None if none of them has a usable header.

    What cannot be used is rejected with its line.  In memory are a batch of rows and the requests in the engine.
    """
    headed = [(header, file) for file in files if (header := _header(file)) is not None]
    if not headed:
        return None
    engines = sorted({header.engine for header, _file in headed})
    starts = sorted((pair for pair in headed if pair[0].engine == engines[0]), key=lambda pair: pair[0].started_ns)
    header, file = starts[-1]
    remarks = []
    if engines[1:]:
        further = f"{len(engines) - 1} further engines (data parallel)"
        remarks.append(f"step logs of {further}: not used, engine {engines[0]} is")
    if starts[1:]:
        remarks.append(f"step logs of {len(starts) - 1} earlier starts of the server: the last one is used")
    if header.absent:
        version = header.settings.get("vllm_version")
        remarks.append(f"in the step log what vLLM {version} lacks: {', '.join(header.absent)}")
    return _Reading(file, header, scratch).log(tuple(remarks))


@dataclass(frozen=True)
class _Header:
    engine: int
    zero_ns: int
    started_ns: int  # epoch
    settings: Mapping[str, object]
    model: str | None
    speculates: bool
    absent: tuple[str, ...]


def _header(file: RecordedFile) -> _Header | None:
    first = file.head(MAX_LINE_BYTES).partition(b"\n")[0]
    try:
        said = _HEADER.decode(first)
    except DECODE_ERRORS as error:
        file.tally.reject("line 1", f"not the header of a step log ({error})")
        return None
    started = section(said, "started")
    zero_ns, started_ns = whole(started.get("monotonic_ns")), whole(started.get("wall_ns"))
    if said.get("blis_replay_steps") != FORM or zero_ns is None or started_ns is None:
        file.tally.reject("line 1", f"a header of another form than {FORM}, or without the time at which it started")
        return None
    settings = dict(section(said, "settings"))
    if version := text(said.get("vllm")):
        settings["vllm_version"] = version
    groups, drafted = said.get("kv_cache_groups"), whole(said.get("speculative_tokens"))
    if isinstance(groups, list) and len(groups) > 1:
        from blis_replay.ingest.readers.server.layers import SEVERAL, groups_of_specs

        found = groups_of_specs(said.get("kv_cache_specs"), whole(settings.get("block_size")))
        settings["kv_cache_groups"] = str(len(groups)) if found == SEVERAL else found
    if drafted:
        settings["speculative_config"] = f"num_speculative_tokens={drafted}"
    absent = said.get("absent")
    return _Header(
        engine=whole(said.get("engine")) or 0,
        zero_ns=zero_ns,
        started_ns=started_ns,
        settings=settings,
        model=text(said.get("model")),
        speculates=bool(drafted),
        absent=tuple(name for value in absent[:50] if (name := text(value))) if isinstance(absent, list) else (),
    )


@dataclass
class _Prompts:
    """The tree of the prompts so far: a prompt a request, by its number in the log.

    ``place``: of each number its row; ``rows``: the row of its parent or -1, the tokens that the two share, its tokens.
    """

    place: dict[int, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, number: int, prompt_tokens: int, parent: int | None, shared_tokens: int) -> None:
        self.place[number] = len(self.rows)
        row = -1 if parent is None else self.place.get(parent, -1)
        self.rows.append((row, shared_tokens if row >= 0 else 0, prompt_tokens))

    def of_journeys(self, journeys: Journeys) -> RawPrompts:
        """With the journeys as requests, in their order."""
        numbers = journeys.lifecycles["first_span"].to_list()
        mine = np.array([self.place.get(number, -1) for number in numbers], np.int64)
        return RawPrompts(SERVER_BLOCKS, mine, *np.array(self.rows, np.int64).T)


class _Reading:
    """One reading of one log."""

    def __init__(self, file: RecordedFile, header: _Header, scratch: Scratch) -> None:
        self.file, self.header, self.scratch = file, header, scratch
        blocks = tokens(header.settings.get("num_gpu_blocks"))
        self.engine = Engine(
            str(file.path),
            blocks - 1 if blocks else None,
            header.speculates,
            "SchedulerOutput.preempted_req_ids" not in header.absent,
        )
        self.writers = {name: scratch.writer(schema) for name, schema in _SCHEMAS.items()}
        self.prompts = _Prompts()
        self.shares_known = False
        self.read = dict.fromkeys(("s", "u", "a", "f"), 0)
        self.tokens = self.gaps = 0
        self.next_step = 0
        self.said: dict[str, int] = {}
        self.paused: dict[str, object] = {}
        self.features: set[str] = set()
        self.ended = self.counted = False

    def log(self, remarks: tuple[str, ...]) -> StepLog:
        for number, line in lines(self.file, MAX_LINE_BYTES):
            if number == 1 or not line.strip():
                continue
            try:
                self._line(_LINE.decode(line))
            except _BROKEN as error:
                self.file.tally.reject(f"line {number}", f"not a line of a step log ({error})")
                continue
            self.file.tally.records += 1
            if max(map(len, self.engine.rows.values())) >= BATCH_ROWS:
                self._keep()
        self.engine.end()
        self._keep()
        rows = {name: writer.done() for name, writer in self.writers.items()}
        lifecycles = otlp_journeys.by_arrival(rows["requests"], self.scratch)
        journeys = Journeys(lifecycles, rows["events"], self.header.model, ())
        return StepLog(
            steps=rows["steps"],
            snapshots=rows["snapshots"],
            journeys=journeys,
            settings={**self.header.settings, **self.paused},
            model=self.header.model,
            prompts=self.prompts.of_journeys(journeys) if self.shares_known else None,
            measured=self._measured(),
            remarks=(*remarks, *self._remarks()),
            features=tuple(sorted(self.features)),
        )

    def _keep(self) -> None:
        for name, rows in self.engine.rows.items():
            # A column that a row does not name is null.
            self.writers[name].add(pl.DataFrame(rows, schema=_SCHEMAS[name]))
            rows.clear()

    def _line(self, values: list[Any]) -> None:
        kind = values[0] if values else None
        self.counted = False
        if kind == "s":
            self._step(values)
        elif kind == "u":
            _kind, step, begin, took = values[:4]
            numbers_of([begin, took])
            self.engine.update(step, self.header.zero_ns + begin + took, tuple(pairs_of(values[4])))
        elif kind == "a":
            self._arrival(values)
        elif kind == "f":
            number, at, status, *counts = values[1:7]
            numbers_of([number, at])
            made, preemptions, computed = (whole(count) for count in counts)
            at_ns, ended = self.header.zero_ns + at, str(text(status))
            self.engine.finish(number, at_ns, ended, made or 0, preemptions, computed or 0)
        elif kind == "p":
            if (state := text(values[2])) not in (None, "UNPAUSED"):
                self.paused = {"pause_state": state}
        elif kind in ("c", "end"):
            said = section(values, "2")
            self.said = {name: whole(said.get(name)) or 0 for name in _COUNTERS}
            self.counted, self.ended = True, kind == "end"
        else:
            raise ValueError("an unknown kind")
        if kind in self.read:
            self.read[kind] += 1

    def _step(self, values: list[Any]) -> None:
        step, begin, took, cost, running, waiting, free, ones, others, admitted, preempted = values[1:12]
        numbers_of([step, begin, took, cost, running, waiting])
        if not isinstance(free, int):
            raise ValueError("not a number of free blocks")
        counts = (*((number, 1) for number in numbers_of(ones)), *pairs_of(others))
        begin_ns = self.header.zero_ns + begin
        self.gaps += max(step - self.next_step, 0)
        self.next_step = step + 1
        self.tokens += sum(count for _number, count in counts)
        of_step = (step, begin_ns, begin_ns + took, running, waiting, free, counts)
        self.engine.schedule(Step(*of_step, tuple(pairs_of(admitted)), numbers_of(preempted)))

    def _arrival(self, values: list[Any]) -> None:
        number, name = whole(values[1]), text(values[2])
        if number is None or name is None:
            raise ValueError("a request without number or name")
        if len(values) == 3:
            self.engine.arrive(number, Arrival(name))
            return
        queued, now, wall_ns, arrived, prompt_tokens, max_tokens, _priority, parent, shared = values[3:12]
        numbers_of([queued, now, wall_ns, prompt_tokens, shared])
        self.features.update(name for value in values[12:13] for one in value if (name := text(one)))
        zero_ns = self.header.zero_ns
        offset_ns = wall_ns - (zero_ns + now)
        arrived_ns = None if whole(arrived) is None else arrived - offset_ns
        if arrived_ns is not None and arrived_ns > zero_ns + queued:
            arrived_ns = None  # another host's clock
        arrival = Arrival(name, zero_ns + queued, arrived_ns, offset_ns, prompt_tokens, whole(max_tokens))
        self.engine.arrive(number, arrival)
        self.shares_known |= bool(self.header.settings.get("enable_prefix_caching"))
        self.prompts.add(number, prompt_tokens, whole(parent), shared)

    def _measured(self) -> dict[str, float | int | str | None]:
        steps = self.read["s"]
        return {
            "steps": steps,
            "steps_missing": self.gaps,
            "arrivals": self.read["a"],
            "finished": self.read["f"],
            "scheduled_tokens": self.tokens,
            "dropped": self.said.get("dropped"),
            **{f"counted_{name}": self.said.get(name) for name in _COMPARED},
            "counted_to_the_end": int(self.counted),
            "ended_in_order": int(self.ended),
            "requests_conserved": self.engine.conserved,
            "requests_not_conserved": self.engine.unequal,
            "wrapper_us_per_step": self.said.get("wrapper_ns", 0) / steps / 1e3 if steps else None,
            "writer_us_per_step": self.said.get("writer_ns", 0) / steps / 1e3 if steps else None,
        }

    def _remarks(self) -> Iterator[str]:
        if self.gaps:
            yield f"{counted(self.gaps, 'engine step')} that the step log dropped"
        if self.engine.unequal:
            yield f"steps of {counted(self.engine.unequal, 'request')}: the step log has not all that they computed"


_SCHEMAS: dict[str, Schema] = {
    "steps": READ_STEP_SCHEMA,
    "snapshots": SNAPSHOT_SCHEMA,
    "events": EVENT_SCHEMA,
    "requests": READ_LIFECYCLE_SCHEMA,
}
