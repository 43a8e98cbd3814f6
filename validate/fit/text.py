"""The answers of a calibration and of a comparison of single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from shlex import quote
from typing import Any

from blis_replay.base.errors import counted
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, PartScore
from blis_replay.ingest.recording import UNKNOWN, Recording
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named, table_of
from blis_replay.validate.fit.calibrate import CalibratedFile, ModelFit
from blis_replay.validate.fit.cycle_rows import busy_depth
from blis_replay.validate.fit.every_step import FORM, ROOFLINE_FORM
from blis_replay.validate.fit.evidence import cold_start_of, counted_windows, is_load_level
from blis_replay.validate.fit.next_recording import MINUTES, Load, NextRecording
from blis_replay.validate.fit.scores import MOST_MISSED
from blis_replay.validate.fit.step_errors import StepError
from blis_replay.validate.text.answer import Answer, Block, Line, Part, Verbatim
from blis_replay.validate.text.cells import percent, percent_plain

_COEFFICIENT_COLUMNS = columns_named("coefficient", "us", "95 % from", "to", "status")
# Halves of 95 % intervals of a mean step: certain enough for any limit, and as far as one can be foreseen.
_WORTH_RECORDING, _CERTAIN = 0.02, 0.01
_SCORED = ("e2e", "e2e_p99", "ttft", "ttft_p99", "itl")
_SCORE_COLUMNS = (
    *columns_named("experiment", "part", kind="text"),
    *columns_named("E2E", "p99", "TTFT", "p99", "ITL", kind="error"),
    Column("requests", "count", wide=1),
    Column("of the run", "word", wide=2),
    Column("slug", "text", wide=3),
)


def calibration_answer(
    file: CalibratedFile, recordings: Sequence[Recording], to_judge: tuple[str, str], left_out: Sequence[str] = ()
) -> Answer:
    """For each model its coefficients with bounds, the scheduling mode, and scores by part; a row per coefficient.

    ``recordings``: all that were fitted to; ``to_judge``: the alias of what to judge with the release, best another
    recording of the server, and the options of ``validate``.
    ``left_out``: reasons.  The exit code is 1 if the release was not written.  In the document coefficients are in us,
    errors of windows in percent, and scores are fractions.
    """
    release, fits, written, replaced = file.path, file.fits, file.written, file.replaced
    aliases = {recording.slug: recording.alias for recording in recordings}
    alias, options = to_judge
    command = f"blis-replay validate {quote(alias)}{options}"
    why = "judge another recording with it"
    if alias in aliases.values():
        why = "try it, and record another load of this server to judge it by"
        command += "" if cold_start_of(recordings[0]) is None else " --replay warm_up=recorded"
    rows = [
        {"model": fit.entry.model, "tensor_parallelism": fit.entry.tensor_parallelism, **asdict(coefficient)}
        for fit in fits
        for coefficient in fit.record.coefficients
    ]
    misses = [f"{fit.entry.model}: misses its own training data: {'; '.join(fit.missed)}" for fit in fits if fit.missed]
    earlier = "" if replaced is None else f" in place of an earlier release (sha256 {replaced[:12]})"
    done = Line(f"{release} not written; {_remedy(fits)}")
    ended = Verbatim(f"wrote {release}{earlier}; {why}:\n  {command}") if written else done
    document = {"release": release, "written": written, "replaced": replaced, "left_out": list(left_out)}
    page: list[Part] = [Line(f"left out: {why}", "  ", Toned("left out:", "caution")) for why in left_out]
    for fit in fits:
        scores = [_score(score, aliases) for score in fit.record.scores]
        page += [
            Block(_fit(fit)),
            *([Table("", _SCORE_COLUMNS, scores)] if scores else []),
            *next_parts(fit.next),
        ]
    page.append(Block([*(Line(miss, mark=Toned("misses", "bad")) for miss in misses), ended]))
    document |= {"fits": [_document(fit) for fit in fits]}
    return Answer(page, document, table_of(rows), int(not written), tuple(misses))


def _remedy(fits: Sequence[ModelFit]) -> str:
    """The remedy for fits that miss their own data: where parts of a run disagree, no engine argument is wrong."""
    parts: dict[str, list[PartScore]] = {}
    for score in (score for fit in fits if fit.missed for score in fit.record.scores if score.part != "test"):
        parts.setdefault(score.experiment, []).append(score)
    apart, of_run = 0.0, list[PartScore]()
    for scores in parts.values():
        errors = [score.errors.get("e2e", 0.0) for score in scores]
        if max(errors) - min(errors) > apart:
            apart, of_run = max(errors) - min(errors), scores
    if apart > 2 * MOST_MISSED["e2e"]:
        each = ", ".join(f"{percent(s.errors.get('e2e', 0.0))} in {s.begin:g}:{s.until:g}" for s in of_run)
        cause = f"the server's pace changed (E2E is off by {each}): fit a --window of it, or record this load again"
    else:
        cause = "check the engine arguments (KV blocks, max_num_seqs)"
    return f"{cause}, or write it anyway with --force"


def _document(fit: ModelFit) -> dict[str, Any]:
    fields = ("experiment", "part", "window", "requests", "errors")
    return {
        "model": fit.entry.model,
        "tensor_parallelism": fit.entry.tensor_parallelism,
        "used": [{"experiment": recording.slug, "data": kind} for recording, kind in fit.used],
        "windows": fit.rows,
        "window_error_percent": fit.agreement,
        "missed": list(fit.missed),
        "remarks": list(fit.remarks),
        **asdict(fit.record),
        "other_forms": [{"form": other.form, "weight": other.weight} for other in fit.record.other_forms],
        "scores": [{name: getattr(score, name) for name in fields} for score in fit.record.scores],
        "scheduling_configured": None if fit.scheduling is None else fit.scheduling.configured,
        "scheduling_contradicts": fit.scheduling is not None and fit.scheduling.contradicts,
        "next_recording": None if fit.next is None else fit.next.document(),
    }


def _fit(fit: ModelFit) -> list[Part]:
    record, title = fit.record, f"{fit.entry.model} tp {fit.entry.tensor_parallelism}"
    agreement = ", ".join(f"{name.upper() if name != 'cycle' else name} {v:.1f} %" for name, v in fit.agreement.items())
    remarks = [f"  {c.name}: {c.remark}" for c in record.coefficients if c.status != "fitted"]
    levels = all(is_load_level(recording) and not counted_windows(recording) for recording, _data in fit.used)
    row = "load level" if levels else "step" if record.form in (FORM, ROOFLINE_FORM) else "window"
    drawn = "draws of load levels" if levels else f"draws of blocks of neighbouring {row}s"
    return [
        Line(f"{title}: {record.form}", mark=Toned(title, "heading")),
        Line(f"  {fit.rows:,} {row}s; mean absolute error of a {row}: {agreement}", "    "),
        Line(f"  95 %: bounds of a coefficient over {drawn}", "    "),
        coefficients_table(record),
        *(Line(remark, "    ") for remark in remarks),
        *(Line(f"  {remark}", "    ") for remark in fit.remarks),
        *_scheduling(fit),
    ]


def with_next(answer: Answer, asked: NextRecording | None) -> Answer:
    """An explanation with the load to record next, last."""
    document = {**answer.document, "next_recording": None if asked is None else asked.document()}
    # Its command is what `calibrate` prints.
    said = next_parts(asked, lead="for a better fit, not for this verdict: ", with_command=False)
    return replace(answer, page=[*answer.page, *said], document=document)


def next_parts(asked: NextRecording | None, lead: str = "", *, with_command: bool = True) -> list[Part]:
    """The load to record next, where it narrows something worth the while; ``lead``: what the sentence begins with."""
    if asked is None or asked.now < _WORTH_RECORDING:
        return []
    load = "that load" if asked.load == asked.least_certain else _load(asked.load)
    then = f"±{percent_plain(asked.then)}" if asked.then > _CERTAIN else f"less than ±{percent_plain(_CERTAIN)}"
    why = (
        f"{lead}least certain is the mean step under {_load(asked.least_certain)}, "
        f"±{percent_plain(asked.now)}; {MINUTES} minutes of {load} would leave {then}"
    )
    if not with_command:
        return [Line(why)]
    command = " \\\n    ".join(asked.load.command)
    return [Block([Line(f"  {why}:", "    "), Verbatim(f"  {command}")])]


def _load(load: Load) -> str:
    lengths = f"{load.prompt_tokens:,} prompt and {load.output_tokens:,} output tokens"
    arguments = "".join(f" on a server started with {name} {value}" for name, value in load.engine.items())
    return f"{load.requests_per_s:g} requests/s of {lengths}{arguments}"


def _scheduling(fit: ModelFit) -> list[Line]:
    evidence = fit.scheduling
    if evidence is None:
        return []
    recorded = evidence.configured_source != UNKNOWN
    stated = f"{evidence.configured} by the recording ({evidence.configured_source})"
    said = f", {stated if recorded else 'not recorded'}"
    modes = f"{evidence.used} used; {evidence.told} by the latencies{said}"
    lines = [Line(f"  scheduling: {modes}", "    "), Line(f"    {evidence.text}", "    ")]
    if evidence.contradicts:
        value = str(evidence.told == "asynchronous").lower()
        warning = (
            "  warning: the latencies contradict the engine argument; if it is wrong, ingest again with "
            f"--engine FILE.yaml that says async_scheduling: {value}"
        )
        lines.append(Line(warning, "    ", Toned("warning:", "bad")))
    return lines


def coefficients_table(record: FitRecord) -> Table:
    """The coefficients of a fit in us, each with its interval of 95 % or what holds it."""
    return Table("", _COEFFICIENT_COLUMNS, [_coefficient(c) for c in record.coefficients])


def _coefficient(fit: CoefficientFit) -> list[Cell]:
    digits = 3 if fit.value_us < 1 else 1 if fit.value_us < 1000 else 0
    held = fit.status == "prior"
    bounds = [None, None] if held else [f"{v:,.{digits}f}" for v in (fit.low_us, fit.high_us)]
    status = Toned("prior: not identified", "caution") if held else fit.status
    return [fit.name, f"{fit.value_us:,.{digits}f}", *bounds, status]


def _score(score: PartScore, aliases: Mapping[str, str]) -> list[Cell]:
    part = " to ".join(percent_plain(share) for share in score.window)
    named = (aliases.get(score.experiment, score.experiment), score.part)
    return [*named, *(score.errors.get(name) for name in _SCORED), score.requests, part, score.experiment]


def steps_answer(recording: Recording, release: str, errors: Sequence[StepError]) -> Answer:
    """Errors of the coefficients of a release against the step cycle, a row for each group of steps; fractions, us."""
    columns = (
        Column("against the step cycle"),
        *(Column("n", "count"), Column("cycle ms", "ms"), Column("MAPE", "share")),
        *(Column("signed", "error"), Column("r", "decimal")),
    )
    cells = [[e.group, e.steps, e.recorded_us, e.mape, e.signed, e.correlation] for e in errors]
    rows = [asdict(error) for error in errors]
    title = f"{recording.alias}: steps by {release}"
    page: list[Part] = [
        Line(title, mark=Toned(title, "heading")),
        Table("", columns, cells),
        f"step cycle: start to start of two steps in a row, with the batch of the earlier one, or of the later one "
        f"under asynchronous scheduling; of {counted(recording.steps.height, 'recorded step')} those with at least "
        f"{counted(busy_depth(recording), 'request')} running, as the engine may be idle after others; r: Pearson's "
        "correlation; signed: of the mean",
    ]
    named = {"slug": recording.slug, "alias": recording.alias, "coefficients": release}
    return Answer(page, {**named, "cycle": rows}, table_of(rows))
