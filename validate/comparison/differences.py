"""The differences of two sides: their intervals and inputs, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, isfinite

import numpy as np

from blis_replay.base.arrays import Bools
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.bounds import Bound
from blis_replay.validate.comparison.changes import change_of_runs
from blis_replay.validate.comparison.compare import compare, requests_of_both
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.named_sides import changed_inputs, inputs_of, only_on_one_side
from blis_replay.validate.comparison.pages import pairs_sentence
from blis_replay.validate.comparison.saturation import overload_sentence
from blis_replay.validate.comparison.sides import Side
from blis_replay.validate.comparison.verdict_text import toned
from blis_replay.validate.judgement import OUTCOMES, Verdict, exit_code, what_decides
from blis_replay.validate.metrics.latency import LatencySamples, MetricStatistic, of_requests
from blis_replay.validate.metrics.observed import Selection, overloaded
from blis_replay.validate.metrics.uncertainty import (
    ASSUMED_RUN_NOISE,
    RUNS_APART,
    Estimate,
    half_width,
    of_requests_alone,
    request_order,
)
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, number_text, percent, percent_span
from blis_replay.validate.text.messages import words


@dataclass(frozen=True)
class Differences:
    """Two sides compared, and what explains how they differ.

    ``runs``: how many recordings stand on each side.  ``changes``: B over A less one with its 95 % interval, by number.
    ``intervals_us``: 95 % of B less A, by number, where there are requests; ``resampled``: in words, what
    they rest on.  ``changed``: inputs that differ, as ``(what, A, B)``; ``one_sided``: those that one side does not
    say.  ``both_replays``: no side is a recording.  ``other_load``: how the loads of two recordings differ; empty where
    they are the same, or draws of the same.
    """

    a: Side
    b: Side
    comparison: Comparison
    runs: tuple[int, int]
    changes: dict[MetricStatistic, Estimate]
    intervals_us: dict[MetricStatistic, tuple[float, float]]
    resampled: str
    changed: list[tuple[str, str, str]]
    one_sided: list[str]
    both_replays: bool
    other_load: str = ""


def differences(a: Side, b: Side, repeats: tuple[Sequence[Side], Sequence[Side]] = ((), ())) -> Differences:
    """Compare two sides, with intervals.

    If both are of the same requests, one by one, intervals are of the differences of each request.  Else each side has
    its own; published numbers stand fixed.  ``repeats``: further recordings of A's server and of B's, which the
    ``changes`` are of as well.
    """
    comparison = compare(a, b)
    both = _same_requests(a, b)
    chosen = (a.requests, b.requests) if both is None else (both, both)
    samples = [None if part is None else side.latencies(part) for side, part in zip((a, b), chosen, strict=True)]
    inputs = inputs_of(a), inputs_of(b)
    half = partial(_half, (a, b), chosen, samples, paired=both is not None)
    numbers = [[side.numbers_us for side in sides] for sides in ((a, *repeats[0]), (b, *repeats[1]))]
    apart = RUNS_APART if _are_two_runs(a, b) else 0.0
    intervals_us, changes = {}, {}
    for cell, known in comparison.cells.items():
        if not known.a_us or known.b_us is None or samples == [None, None] or not of_requests(cell):
            continue
        wide_us, _ = half(cell, (-1.0, 1.0))
        if isfinite(wide_us):
            wide_us = hypot(wide_us, apart * known.b_us)
            intervals_us[cell] = known.b_us - known.a_us - wide_us, known.b_us - known.a_us + wide_us
        wide, blocks = half(cell, (-(known.b_us / known.a_us) / known.a_us, 1 / known.a_us))
        once = of_requests_alone(known.b_us / known.a_us - 1, wide, blocks)
        runs_us = [[run[cell] for run in of if run.get(cell)] for of in numbers]
        changes[cell] = change_of_runs(once, runs_us[0], runs_us[1], apart)
    return Differences(
        a=a,
        b=b,
        comparison=comparison,
        runs=(len(numbers[0]), len(numbers[1])),
        changes=changes,
        intervals_us=intervals_us,
        resampled=_words(samples, both is not None),
        changed=changed_inputs(*inputs),
        one_sided=only_on_one_side(*inputs),
        both_replays=all("simulator" in side for side in inputs),
        other_load=_other_load(a.recording, b.recording, sent_again=both is not None) if apart else "",
    )


def _same_requests(a: Side, b: Side) -> Bools | None:
    """bool[n]: requests that both sides have; None unless each request of one is that of the other.

    Of two recordings they are if all lengths are equal, but for those of requests that failed on one of them: the same
    load, sent again.
    """
    if (both := requests_of_both(a, b, Selection())) is not None or a.requests is None or b.requests is None:
        return both
    rows = a.recording.requests, b.recording.requests
    if rows[0].height != rows[1].height:
        return None
    both = a.requests & b.requests
    one, other = (part.frame(["prompt_tokens", "output_tokens"]).filter(both) for part in rows)
    same = one.equals(other, null_equal=False)
    return both if same and both.sum() > _ANSWERED * len(both) else None


# Share of the requests that both servers answered, in a load that was sent again: chosen, not measured.
_ANSWERED = 0.9
# Two draws of one load: means that lie apart by less than both, as a share and in standard errors.
_SAME_LOAD, _SAME_DRAW = 0.05, 4.0


def _other_load(a: Recording, b: Recording, *, sent_again: bool) -> str:
    """How the mean lengths or the rates of two loads differ, in words; empty if they do not.

    The rate at which a client at its limit sends follows from the server.  ``sent_again``: all lengths are equal, so
    that rates do not differ by what was drawn either.
    """
    from blis_replay.ingest.overload import client_limits  # few comparisons are of two recordings
    from blis_replay.validate.comparison.repeats import other_process

    tables, words = (a.requests, b.requests), {"prompt_tokens": "prompts", "output_tokens": "outputs"}
    for column, what in words.items():
        tokens = [table[column].drop_nulls().to_numpy().astype(np.float64) for table in tables]
        if min(map(len, tokens)) > 1:
            (one, other), errors = (
                (float(of.mean()) for of in tokens),
                [float(of.std() / len(of) ** 0.5) for of in tokens],
            )
            if abs(other - one) > max(_SAME_LOAD * one, _SAME_DRAW * hypot(*errors)):
                return f"another load: {what} of {one:,.0f} and {other:,.0f} tokens on average"
    gaps_s = [np.diff(np.sort(table["arrival_us"].drop_nulls().to_numpy())) / 1e6 for table in tables]
    if min(map(len, gaps_s)) < 2 or client_limits(a) or client_limits(b):
        return ""
    rates = [1 / max(float(of.mean()), 1e-6) for of in gaps_s]  # all at once: a million a second
    errors = [rate**2 * float(of.std()) / len(of) ** 0.5 for rate, of in zip(rates, gaps_s, strict=True)]
    drawn = 0.0 if sent_again else _SAME_DRAW * hypot(*errors)
    if abs(rates[1] - rates[0]) > max(_SAME_LOAD * rates[0], drawn):
        return f"another load: {rates[0]:.3g} and {rates[1]:.3g} requests/s"
    process = other_process(a, b)
    return f"another load: {process}" if process else ""


def _are_two_runs(a: Side, b: Side) -> bool:
    """Whether two recordings are compared, so that they differ by run-to-run noise."""
    return a.run is None and b.run is None and a.recording.content_hash != b.recording.content_hash


def _half(
    sides: Sequence[Side],
    chosen: Sequence[Bools | None],
    samples: Sequence[LatencySamples | None],
    cell: MetricStatistic,
    weights: tuple[float, float],
    *,
    paired: bool,
) -> tuple[float, float]:
    """Half of the interval of a weighted sum of both numbers, and how many stretches of time it rests on."""
    known = [
        ((weight, side), request_order(of.recording, part, side.e2e_us))
        for weight, of, part, side in zip(weights, sides, chosen, samples, strict=True)
        if side is not None and part is not None
    ]
    together = [([side for side, _ in known], known[0][1])] if paired else [([side], order) for side, order in known]
    halves = [half_width(cell, of, order) for of, order in together]
    return hypot(*(half for half, _ in halves)), min(blocks for _, blocks in halves)


def _words(samples: Sequence[LatencySamples | None], paired: bool) -> str:
    if paired:
        return "of the differences of the same requests, over the run"
    known = sum(side is not None for side in samples)
    return {
        0: "none: both sides are published numbers",
        1: "of the requests of the side that has them, the published numbers held fixed",
        2: "of the requests of each side by themselves",
    }[known]


_METRIC_COLUMNS = (
    *(Column(""), Column("A ms", "ms"), Column("B ms", "ms"), Column("B - A ms", "ms_difference")),
    *(Column("95 % interval", "word"), Column("B / A - 1", "error")),
)
_DATA_COLUMNS = (
    *columns_named("metric", "statistic", kind="data"),
    *columns_named("a_ms", "b_ms", "difference_ms", "low_ms", "high_ms", "change", kind="real"),
    Column("reason", "data"),
)


def differences_answer(compared: Differences, bounds: Sequence[Bound] = ()) -> Answer:
    """Head, metric table, what changed in the inputs, how single requests agree; times in ms.

    ``bounds``: of the changes; the worst of them is the exit code, 0 without any.
    The rows are the metrics: bounds are those of the difference's 95 % interval, ``change`` is B over A less one.
    """
    judged = [_judged(compared, bound) for bound in bounds]
    verdicts = [verdict for verdict, _ in judged]
    shown: list[list[Cell]] = []
    rows: list[list[Cell]] = []
    for (metric, name), cell in compared.comparison.cells.items():
        between_us = compared.intervals_us.get((metric, name))
        interval = between_us and " .. ".join(number_text(bound, "ms_difference") for bound in between_us)
        shown.append([f"{metric.upper()} {name}", cell.a_us, cell.b_us, cell.difference_us, interval, cell.error])
        times_us = (cell.a_us, cell.b_us, cell.difference_us, *(between_us or (None, None)))
        rows.append([metric, name, *map(in_ms, times_us), cell.error, cell.reason])
    page: list[Part] = [
        *([Block([line for _, line in judged])] if judged else []),
        _head(compared),
        Table("", _METRIC_COLUMNS, shown),
        _remarks(compared),
        _inputs(compared),
        pairs_sentence(compared.comparison),
    ]
    held = [
        {"name": bound.name, "bound": bound.text, "verdict": verdict, "message": line.text}
        for bound, (verdict, line) in zip(bounds, judged, strict=True)
    ]
    code = exit_code(verdicts) if verdicts else 0
    return Answer(page, {"bounds": held, **_document(compared)}, Table("", _DATA_COLUMNS, rows), code)


def _judged(compared: Differences, bound: Bound) -> tuple[Verdict, Line]:
    """A bound held against the change of its number, with the reason or what would decide."""
    metric, statistic = bound.cell
    change, cell = compared.changes.get(bound.cell), compared.comparison.metrics[metric][statistic]
    queue = metric in ("e2e", "ttft") and any(overloaded(side.recording.findings) for side in (compared.a, compared.b))
    if change is None or queue or compared.other_load:
        published = cell.a_us is not None and cell.b_us is not None
        nothing = "published numbers alone have no interval" if published else "nothing observed"
        why = "of an overloaded recording it measures the queue" if queue else cell.reason or nothing
        verdict, said = OUTCOMES["absent"], f"{bound.name}: {compared.other_load or why}"
    else:
        verdict = OUTCOMES[bound.state(change.low, change.high)]
        known = f" ({percent_span(change.low, change.high)})" if change.interval else ""
        said = f"{bound.name} {percent(change.error)}{known}, {bound.text}"
        if verdict == "UNDECIDED":
            missing = min(abs(end - change.error) for end in (bound.low, bound.high))
            needs = what_decides(bound.name, change, missing, compared.comparison.requests)
            by_runs = "repeats" in change.parts or needs.code in ("needs_repeat", "needs_more_runs")
            said += "; record more runs of either side" if by_runs else f"; {words(needs)}"
    return verdict, Line(f"{verdict}  {said}", mark=toned(verdict))


def _head(compared: Differences) -> Block:
    sides = zip(("A", "B"), (compared.a, compared.b), compared.comparison.compared, strict=True)
    lines = [(f"{letter}:", f"{side.what} ({count:,} requests)") for letter, side, count in sides]
    sides_lines = [Line(f"{letter} {said}", "   ", Toned(letter, "heading")) for letter, said in lines]
    if not compared.other_load:
        return Block(sides_lines)
    why = f"{compared.other_load}: what changes is not of the server alone, and no bound is judged"
    return Block([*sides_lines, Line(why, mark=Toned("another load", "caution"))])


def _remarks(compared: Differences) -> Block:
    lines = [f"intervals: {compared.resampled}; quantiles of ITL are pooled over tokens and have none"]
    reasons: dict[str, list[str]] = {}
    for (metric, statistic), cell in compared.comparison.cells.items():
        if cell.reason:
            reasons.setdefault(cell.reason, []).append(f"{metric.upper()} {statistic}")
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if max(compared.runs) > 1:
        of_a, of_b = compared.runs
        lines.append(f"bounds: of {of_a} recordings of A and {of_b} of B; the table is of the first of each")
    elif _assumes_noise(compared):
        lines.append(
            f"one recording per side: intervals assume that runs of a server differ by {100 * ASSUMED_RUN_NOISE:g} % "
            "(standard deviation, not measured); to measure it, record both again and name them A1,A2 B1,B2"
        )
    overloads = dict.fromkeys(overload_sentence(side.recording) for side in (compared.a, compared.b))
    return Block([*lines, *filter(None, overloads)])


def _assumes_noise(compared: Differences) -> bool:
    """Whether each server was recorded once, so that nothing measures its run-to-run noise."""
    return max(compared.runs) == 1 and _are_two_runs(compared.a, compared.b)


def _inputs(compared: Differences) -> Block:
    changed = [
        line
        for name, one, other in compared.changed
        for line in (f"  {name}", Line(f"    A: {one}", "       "), Line(f"    B: {other}", "       "))
    ]
    same = "inputs: nothing that both sides say differs"
    parts: list[Part] = [Block(changed, "inputs that differ") if changed else same]
    if compared.one_sided and compared.both_replays:
        parts.append(f"on one side only: {', '.join(compared.one_sided)}")
    return Block(parts)


def _document(compared: Differences) -> dict[str, object]:
    sides = zip((compared.a, compared.b), compared.comparison.compared, strict=True)
    a, b = (
        {
            "name": side.name,
            "what": side.what,
            "slug": side.recording.slug,
            "requests": requests,
            "overloaded": bool(overload_sentence(side.recording)),
        }
        for side, requests in sides
    )
    metrics: dict[str, dict[str, object]] = {}
    for cell, number in compared.comparison.cells.items():
        change, between_us = compared.changes.get(cell), compared.intervals_us.get(cell)
        metrics.setdefault(cell[0], {})[cell[1]] = {
            "a_ms": in_ms(number.a_us),
            "b_ms": in_ms(number.b_us),
            "difference_ms": in_ms(number.difference_us),
            "interval_ms": between_us and [in_ms(bound) for bound in between_us],
            **({} if number.reason is None else {"reason": number.reason}),
            **({} if change is None else {"change": change.error, "change_interval": [change.low, change.high]}),
        }
    return {
        "a": a,
        "b": b,
        "runs": list(compared.runs),
        "other_load": compared.other_load or None,
        "assumed_run_noise": ASSUMED_RUN_NOISE if _assumes_noise(compared) else None,
        "metrics": metrics,
        "resampled": compared.resampled,
        "inputs_changed": [{"input": name, "a": one, "b": other} for name, one, other in compared.changed],
        "inputs_one_sided": compared.one_sided,
        "paired": {metric: vars(pairing) for metric, pairing in compared.comparison.paired.items()},
    }
