"""Sweeps: recordings of one server at several loads, as one experiment with one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from typing import Literal

import polars as pl

from blis_replay.base.errors import NothingToJudgeError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.tables import Cell, Column, Table
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.overview import error_cell
from blis_replay.validate.comparison.verdict_text import toned, verdict_line
from blis_replay.validate.judgement import VERDICTS, Verdict
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, percent_span

# Levels whose mean lengths differ by more than this share are not of one sweep.
_SAME_LENGTHS = 0.1
# Beyond the knee more load adds more latency than throughput: E2E grows faster than the square root of the load.
_KNEE = 0.5
By = Literal["clients", "requests/s"]


@dataclass(frozen=True)
class Sweep:
    """Levels by ascending ``loads``: numbers of clients, or rates."""

    by: By
    loads: tuple[float, ...]
    levels: tuple[Comparison, ...]

    @property
    def verdict(self) -> Verdict:
        """That of the level that decides."""
        return self.levels[self.decides].verdict

    @property
    def decides(self) -> int:
        """Index of the level that the verdict rests on: the worst; of several, the farthest beyond its limit."""

        def rank(i: int) -> tuple[int, float]:
            judgement, largest = self.levels[i].judgement, self.levels[i].judgement.largest
            return VERDICTS.index(judgement.verdict), -(largest.reach if largest else 0.0)

        return min(range(len(self.levels)), key=rank)

    @property
    def gap(self) -> str:
        """The metric between tokens that was recorded: ``itl`` or ``tpot``."""
        known = any(level.metrics["itl"]["mean"].a_us is not None for level in self.levels)
        return "itl" if known else "tpot"

    @property
    def knees(self) -> dict[str, float | None]:
        """By side, the load beyond which E2E grows faster than the square root of the load; None if it never does."""
        means = [level.metrics["e2e"]["mean"] for level in self.levels]
        sides = {"observed": [cell.a_us for cell in means], "simulated": [cell.b_us for cell in means]}
        return {side: self._knee(us) for side, us in sides.items()}

    def _knee(self, e2e_us: Sequence[float | None]) -> float | None:
        points = [(load, us) for load, us in zip(self.loads, e2e_us, strict=True) if us]
        for (load, us), (more, longer_us) in pairwise(points):
            if more > load and log(longer_us / us) > _KNEE * log(more / load):
                return load
        return None

    def throughput(self, i: int) -> tuple[float | None, float | None]:
        """Requests per second on both sides.  Little's law gives that of clients that each wait for an answer."""
        e2e = self.levels[i].metrics["e2e"]["mean"]
        if self.by == "clients":
            observed, simulated = (us and self.loads[i] / us * 1e6 for us in (e2e.a_us, e2e.b_us))
            return observed, simulated
        return (None, None) if self.levels[i].overloaded else (self.loads[i], self.loads[i])


# The largest load of a sweep over its smallest, at least: nearer ones are one load, recorded twice (chosen).
_APART = 1.1


def sweeps_of(comparisons: Sequence[Comparison]) -> list[Sweep]:
    """Groups of loads that differ, with the same model, GPUs, engine and mean lengths."""
    groups: list[list[tuple[float, Comparison]]] = []
    kinds: list[tuple[object, list[float]]] = []
    for comparison in comparisons:
        load = load_of(comparison.recording)
        if load is None:
            continue
        of, lengths = comparison.recording, _lengths(comparison.recording)
        engine = frozenset((name, str(setting.value)) for name, setting in of.engine.items())
        unstated = of.workload if 0 in lengths else ""  # then the name of the workload has to be the same
        kind = (load[0], of.model, of.hardware, of.tensor_parallelism, engine, comparison.run.release.name, unstated)
        for group, (same, near) in zip(groups, kinds, strict=True):
            if same == kind and _near(near, lengths):
                group.append((load[1], comparison))
                break
        else:
            groups.append([(load[1], comparison)])
            kinds.append((kind, lengths))
    return [
        Sweep(kind[0], *zip(*sorted(group, key=lambda level: level[0]), strict=True))  # type: ignore[index]
        for group, (kind, _lengths_of) in zip(groups, kinds, strict=True)
        if max(load for load, _ in group) > _APART * min(load for load, _ in group)
    ]


def one_sweep(comparisons: Sequence[Comparison]) -> Sweep:
    """The sweep whose levels these are; raises ``NothingToJudgeError`` where they are not all of one."""
    sweeps = sweeps_of(comparisons)
    if len(sweeps) != 1 or len(sweeps[0].levels) != len(comparisons):
        named = ", ".join(comparison.alias for comparison in comparisons)
        raise NothingToJudgeError(f"{named}: not the levels of one sweep; name one experiment")
    return sweeps[0]


def below_sweep(answer: Answer, sweep: Sweep) -> Answer:
    """An answer about the level that decides, below the sweep."""
    document = {**answer.document, "sweep": sweep_json(sweep)}
    return replace(answer, page=[*sweep_parts(sweep), *answer.page], document=document)


def load_of(recording: Recording) -> tuple[By, float] | None:
    """The clients, or the rate, of a recording that has one load only."""
    clients = _aggregate(recording, "concurrency", "asked")
    if clients:
        return ("clients", max(clients)) if len(set(clients)) == 1 else None
    return ("requests/s", recording.stages[0].rate_per_s) if len(recording.stages) == 1 else None


def _aggregate(recording: Recording, metric: str, statistic: str) -> list[float]:
    of = (pl.col("metric") == metric) & (pl.col("statistic") == statistic)
    return [value for value in recording.aggregates.filter(of)["value"].to_list() if value > 0]


def _lengths(recording: Recording) -> list[float]:
    """Mean prompt and output tokens; 0 if unknown."""
    names = (("prompt_tokens",), ("output_tokens", "output_tokens_reported"))
    return [next((v for name in of for v in _aggregate(recording, name, "mean")), 0.0) for of in names]


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= _SAME_LENGTHS * max(a, b) for a, b in zip(one, other, strict=True))


# -- Laid out --------------------------------------------------------------------------------------------------

_SIDES = (Column("sim", "ms"), Column("error", "error_short"), Column("95 %", "word", wide=1))
# Columns of a wide terminal.
_INTERVALS = "95 %: interval of the error to its left, for another recording of the load"


def sweep_parts(sweep: Sweep) -> list[Part]:
    """The verdict with the level that decides it, the knee, and a row per level."""
    said = Line(f"{sweep.verdict}  {sweep_text(sweep)}", mark=toned(sweep.verdict))
    return [
        Block([said, verdict_line(sweep.levels[sweep.decides].judgement), knee_text(sweep)]),
        sweep_table(sweep),
    ]


def sweep_text(sweep: Sweep) -> str:
    """Levels, model, and the level that decides."""
    model = sweep.levels[0].recording.model or "an unnamed model"
    return f"{len(sweep.levels)} levels by {sweep.by} of {model}: decided at {_load_text(sweep, sweep.decides)}"


def _load_text(sweep: Sweep, i: int) -> str:
    load = sweep.loads[i]
    return "1 client" if sweep.by == "clients" and load == 1 else f"{load:g} {sweep.by}"


def knee_text(sweep: Sweep) -> str:
    """Where the knee is on both sides."""
    knees = [f"{'none' if knee is None else f'{knee:g}'} {side}" for side, knee in sweep.knees.items()]
    return f"knee (beyond it E2E grows faster than the square root of the load): {', '.join(knees)}"


def sweep_table(sweep: Sweep) -> Table:
    """A row per level: latencies and throughput of both sides, errors with their intervals, and the verdict."""
    columns = (
        Column(sweep.by, "word"),
        *(Column("TTFT ms", "ms"), *_SIDES),
        *(Column(f"{sweep.gap.upper()} ms", "ms"), *_SIDES),
        *(Column("req/s", "decimal"), Column("sim", "decimal")),
        Column("verdict", "word"),
    )
    return Table("", columns, [_row(sweep, i) for i in range(len(sweep.levels))], note=_INTERVALS)


def _row(sweep: Sweep, i: int) -> list[Cell]:
    level = sweep.levels[i]
    row: list[Cell] = [f"{sweep.loads[i]:g}"]
    for metric in ("ttft", sweep.gap):
        cell = level.metrics[metric]["mean"]
        row += [cell.a_us, cell.b_us, error_cell(level.judgement, (metric, "mean"), cell.error)]
        row.append("" if (span := level.interval((metric, "mean"))) is None else percent_span(*span))
    return [*row, *sweep.throughput(i), toned(level.verdict)]


def sweep_json(sweep: Sweep) -> dict[str, object]:
    """Verdict, deciding level, knees, and the curves; times in ms, throughput in requests per second."""
    return {
        "by": sweep.by,
        "verdict": sweep.verdict,
        "decides": sweep.levels[sweep.decides].slug,
        "knee": sweep.knees,
        "levels": [
            {
                "load": sweep.loads[i],
                "slug": level.slug,
                "verdict": level.verdict,
                "requests_per_s": list(sweep.throughput(i)),
                **{
                    metric: {
                        "observed_ms": in_ms(cell.a_us),
                        "simulated_ms": in_ms(cell.b_us),
                        "error": cell.error,
                        "interval": level.interval((metric, "mean")),
                    }
                    for metric in ("ttft", "itl", "tpot", "e2e")
                    for cell in (level.metrics[metric]["mean"],)
                },
            }
            for i, level in enumerate(sweep.levels)
        ],
    }
