"""The leaderboard for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, columns_named
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.judgement import HELD_OUT
from blis_replay.validate.metrics.skill import SCORED
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay_labs.board.leaderboard import SHOWN, Board, Cost, Score
from blis_replay_labs.board.simulators import AS_SHIPPED

_MIB = 1 << 20
_SUMMARY = (
    Column("mean |error|", "text"),
    *(Column("runs", "word", spare=1), *columns_named("held out", "pass", "E2E", "TTFT", kind="word")),
    *(Column("ITL", "word", spare=3), *columns_named("E2E p99", "TTFT p99", kind="word")),
    *(Column("tokens/s", "word", wide=1), Column("rank E2E", "decimal", wide=2)),
    # Per run, of the process that simulates.
    *(Column("s/run", "decimal", spare=2), Column("peak MB", "count", wide=3)),
)
_ROWS = (
    Column("", "text"),
    Column("fitted on", "text"),
    Column("", "word"),
    *columns_named("E2E", "TTFT", "ITL", "E2E p99", "TTFT p99", kind="error_brief"),
    Column("most in", "text", wide=1),
    Column("costs most", "text", wide=1),
)
_COSTS = (
    Column("costs most", "text"),
    Column("component", "text"),
    *columns_named("recordings", "E2E", "TTFT", kind="word"),
    Column("evidence", "text"),
)
_SUMMED = (("e2e", "mean"), ("ttft", "mean"), ("itl", "mean"), ("e2e", "p99"), ("ttft", "p99"))


def leaderboard_answer(board: Board) -> Answer:
    """One row per simulator over all recordings; ``-v`` adds a table per recording; CSV has a row per score."""
    judged = {score.alias for score in board.scores if not score.overloaded and not score.problem}
    overloaded = {score.alias for score in board.scores if score.overloaded}
    notes: list[Part] = [Line(f"not run: {name}: {why}") for name, why in board.absent.items()]
    problems = Counter((score.simulator, score.problem) for score in board.scores if score.problem)
    notes += [Line(f"no answer: {name}, {counted(count, 'run')}: {why}") for (name, why), count in problems.items()]
    if overloaded:
        notes.append(Line(f"left out of the means, because overloaded: {', '.join(sorted(overloaded))}"))
    skills = [skill for name in board.simulators if (skill := _skill_text(board, name))]
    notes += (
        [Line(f"skill (1: right, 0: as the line in the lengths that fits best), E2E and TTFT: {'; '.join(skills)}")]
        if skills
        else []
    )
    notes.append(Line("every simulator got the same requests and engine arguments"))
    told = [_cost_line(score, score.cost) for score in board.scores if score.cost is not None]
    costs = Block(told, "what costs most, beside the engine here with its coefficients")
    several: list[Part] = [cost_table(board)] if len(told) > len(board.simulators) else []
    table, *runs = board_tables(board)
    head = Line(f"{counted(len(judged), 'recording')}, {counted(len(board.simulators), 'simulator')}")
    return Answer(
        page=[head, table, *several, *runs, costs, Block(notes)],
        document=_document(board),
        data=_data(board),
        brief=[head, table, *(several or [costs]), Block([*notes, "more: -v prints every recording"])],
        exit_code=4 if board.scores and all(score.problem for score in board.scores) else 0,
    )


def _skill_text(board: Board, name: str) -> str:
    """``embedded +0.85 +0.95``; nothing without recorded requests."""
    skills = [board.skill(name, metric) for metric in SCORED]
    if None in skills:
        return ""
    repeats = [board.beside_repeats(name, metric) for metric in SCORED]
    if None not in repeats:
        beside = " and ".join(f"{ratio:.1f}" for ratio in repeats)
        return f"{name} {' '.join(f'{skill:+.2f}' for skill in skills)} ({beside} of the difference of repeats)"
    return f"{name} {' '.join(f'{skill:+.2f}' for skill in skills)}"


def board_tables(board: Board) -> list[Table]:
    """Means over the recordings, one row per simulator; then one table per recording."""
    answered = [name for name in board.simulators if board.of(name)]
    counted = [name for name in answered if not all(score.overloaded for score in board.of(name))]
    summary = Table("", _SUMMARY, [_summary(name, board) for name in counted or answered], cut=True)
    return [summary, *(_run_table(alias, board) for alias in dict.fromkeys(score.alias for score in board.scores))]


def cost_table(board: Board) -> Table:
    """One row per simulator: the component that most often costs it most.

    The shares are mean absolute values over the recordings where it does; the evidence is from the largest of them.
    """
    rows = [row for name in board.simulators if (row := _cost_row(name, board)) is not None]
    return Table("", _COSTS, rows, "beside the engine here with its coefficients")


def _cost_row(name: str, board: Board) -> list[Cell] | None:
    told = [(score, score.cost) for score in board.of(name) if isinstance(score.cost, Cost)]
    if not told:
        return None
    component, count = Counter(_largest(cost) for _, cost in told).most_common(1)[0]
    of_it = [(score, cost) for score, cost in told if _largest(cost) == component]
    row: list[Cell] = [name, component, f"{count} of {len(told)}"]
    shares = [cost.shares[cost.largest] for _, cost in of_it if cost.largest is not None]
    if not shares:
        return [*row, "-", "-", f"imitated within {100 * min(cost.left for _, cost in of_it):.1f} % at best"]
    e2e, ttft = (_percent([share[metric] for share in shares]) for metric in (0, 1))
    score, cost = max(of_it, key=lambda pair: max(map(abs, pair[1].shares[str(pair[1].largest)])))
    return [*row, e2e, ttft, f"{score.alias}: {cost.evidence[str(cost.largest)]}"]


def _largest(cost: Cost | str | None) -> str:
    """The largest component, with the inputs that imitate the simulator equally well."""
    if not isinstance(cost, Cost):
        return "-" if cost is None else "not told"
    if not cost.imitated:
        return "not imitated"
    return " or ".join(
        [cost.largest, *cost.also] if cost.tried and cost.largest == cost.tried else [cost.largest or "nothing"]
    )


def _cost_line(score: Score, cost: Cost | str) -> Line:
    """What costs a simulator most on one recording, compared with our engine."""
    who = f"{score.simulator}, {score.alias}"
    if isinstance(cost, str):
        return Line(f"{who}: cannot be told: {cost}")
    near = f"imitated within {100 * cost.left:.1f} %"
    if not cost.imitated:
        return Line(f"{who}: not like an engine: no step time, delay or engine argument imitates it ({near})")
    if cost.largest is None:
        return Line(f"{who}: nothing: it answers like the engine here with these coefficients ({near})")
    e2e, ttft = cost.shares[cost.largest]
    also = f"; {' or '.join(cost.also)} would do as well" if cost.also else ""
    moved = f"E2E {100 * e2e:+.1f} %, TTFT {100 * ttft:+.1f} %"
    return Line(f"{who}: {cost.largest} ({moved}): {cost.evidence[cost.largest]}; {near}{also}")


def _percent(values: Sequence[float | None]) -> str:
    """Mean absolute value; no decimals from 100 % on."""
    mean = mean_abs(values)
    return "-" if mean is None else f"{100 * mean:,.{0 if mean >= 0.9995 else 1}f} %"


def _summary(name: str, board: Board) -> list[Cell]:
    scores = [score for score in board.of(name) if not score.overloaded]
    judged = [score.passes for score in scores if score.passes is not None]
    held_out = sum(score.fitted in HELD_OUT for score in scores)
    peaks = [score.peak_bytes for score in scores if score.peak_bytes]
    stated = any(score.fitted not in ("unknown", AS_SHIPPED) for score in scores)
    shipped = any(score.fitted == AS_SHIPPED for score in scores)
    return [
        name,
        str(len(scores)),
        f"{held_out}" if stated else AS_SHIPPED if shipped else "-",
        f"{sum(judged)} of {len(judged)}",
        *(_percent([score.errors.get(number) for score in scores]) for number in _SUMMED),
        _percent([score.throughput for score in scores]),
        mean_abs([score.rank.get("e2e") for score in scores]),
        mean_abs([score.seconds for score in scores]),
        max(peaks) // _MIB if peaks else None,
    ]


def _run_table(alias: str, board: Board) -> Table:
    scores = [score for score in board.scores if score.alias == alias and not score.problem]
    note = "overloaded: latencies judge no simulator" if any(score.overloaded for score in scores) else ""
    return Table(alias, _ROWS, [_row(score) for score in scores], note)


def _row(score: Score) -> list[Cell]:
    word = "-" if score.passes is None else "pass" if score.passes else "fail"
    worst = score.worst_segment
    errors = [score.errors.get(number) for number in _SUMMED]
    return [
        score.simulator,
        score.fitted.removeprefix("fitted on "),
        word,
        *errors,
        "-" if worst is None else f"{worst[0]} {100 * worst[1]:+.1f} %",
        _largest(score.cost),
    ]


def _data(board: Board) -> Table:
    names = [f"{metric}_{statistic}_error" for metric, statistic in SHOWN]
    columns = columns_named(
        *("simulator", "experiment", "coefficients", "coefficients_use", "pass", *names, "throughput_error"),
        *("e2e_rank_correlation", "ttft_rank_correlation", "e2e_crps", "ttft_crps", "seconds", "peak_bytes", "problem"),
        kind="data",
    )
    rows: list[list[Cell]] = [
        [
            *(score.simulator, score.slug, score.coefficients, score.fitted, score.passes),
            *(score.errors.get(number) for number in SHOWN),
            *(score.throughput, score.rank.get("e2e"), score.rank.get("ttft")),
            *(score.skill[metric].share if metric in score.skill else None for metric in SCORED),
            *(score.seconds, score.peak_bytes, score.problem),
        ]
        for score in board.scores
    ]
    return Table("", columns, rows)


def _document(board: Board) -> dict[str, object]:
    return {
        "simulators": list(board.simulators),
        "skill": {name: {metric: board.skill(name, metric) for metric in SCORED} for name in board.simulators},
        "not_run": dict(board.absent),
        "scores": [
            {
                "simulator": score.simulator,
                "slug": score.slug,
                "alias": score.alias,
                "coefficients": score.coefficients,
                "coefficients_use": score.fitted,
                "pass": score.passes,
                "overloaded": score.overloaded,
                "errors": {
                    metric: {s: score.errors[m, s] for m, s in SHOWN if m == metric and (m, s) in score.errors}
                    for metric in dict.fromkeys(m for m, _ in SHOWN)
                },
                "throughput_error": score.throughput,
                "rank_correlation": dict(score.rank),
                "skill": {metric: one.document for metric, one in score.skill.items()},
                "seconds": score.seconds,
                "peak_bytes": score.peak_bytes,
                "segments": dict(score.segments),
                "not_modelled": list(score.lacks),
                "cost": _cost_json(score.cost) if isinstance(score.cost, Cost) else None,
                "cost_not_told": score.cost if isinstance(score.cost, str) else None,
                "problem": score.problem or None,
            }
            for score in board.scores
        ],
    }


def _cost_json(cost: Cost) -> dict[str, object]:
    return {
        "largest": cost.largest,
        "shares": {name: {"e2e": e2e, "ttft": ttft} for name, (e2e, ttft) in cost.shares.items()},
        "evidence": dict(cost.evidence),
        "left": cost.left,
        "tried": cost.tried,
        "also": list(cost.also),
    }
