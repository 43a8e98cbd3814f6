"""The first screen of a validation: verdict, three rows of numbers, what changed a number, and the next command."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from blis_replay.blis.latency.datasheets import same_gpu
from blis_replay.ingest.checks.overload import CHECK
from blis_replay.ingest.errors import counted
from blis_replay.ingest.recording import Finding
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned
from blis_replay.validate.comparison.arguments import argument_lines
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.saturation_text import saturation_block
from blis_replay.validate.comparison.spread import Decision
from blis_replay.validate.comparison.summary_text import draws_sentence, noise_sentence, promised_lines
from blis_replay.validate.metrics.latency import METRIC_NAMES, TAIL_LIMITS, THRESHOLDS
from blis_replay.validate.metrics.resampling import MetricStatistic
from blis_replay.validate.text.answer import Block, Line, Part
from blis_replay.validate.text.cells import cell_text, percent

_USES = {"unknown": "fitted on unknown runs", "fitted on its steps": "fitted on this run"}
_COLUMNS = (
    *(Column("", "text"), Column("observed mean", "time"), Column("simulated mean", "time")),
    *(Column("error", "error_brief"), Column("limit", "word")),
    *(Column(name, "error_brief") for name in ("p50", "p90", "p99")),
)
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")
_MORE = "more: -v prints every number, assumption and finding"


def first_screen(comparison: Comparison, verdict: str, tone: Tone, again: str = "") -> list[Part]:
    """At most 12 lines of 80 columns where no assumption has to be named.

    ``verdict``: the sentence for a verdict that is neither pass nor fail.  ``again``: options of the command line that
    the next command needs as well.
    """
    return [
        Block([_status(comparison, verdict, tone), *_tail_mark(comparison), _basis(comparison)]),
        Table("", _COLUMNS, [_row(comparison, metric) for metric in THRESHOLDS]),
        Block([*_warnings(comparison), *_changed(comparison.findings), _MORE, f"next: {_next(comparison, again)}"]),
    ]


def tail_errors(comparison: Comparison, decision: Decision = "fail") -> dict[str, float]:
    """By metric, the errors of p99 beyond the limit for tails in all reconstructions, or in some (``not decided``)."""
    found = {metric: comparison.metrics[metric]["p99"].error for metric in TAIL_LIMITS}
    beyond = {m: error for m, error in found.items() if error is not None and abs(error) > TAIL_LIMITS[m]}
    return {m: e for m, e in beyond.items() if comparison.decide((m, "p99"), e, TAIL_LIMITS[m], 0.0) == decision}


def other_hardware(comparison: Comparison) -> list[str]:
    """Coefficients are of one GPU and data type: said where the recording ran on another, or does not tell on which.

    A release that names no data type is taken for 16 bits, unless it was fitted on this run.
    """
    recorded, release = comparison.recording.hardware or "not recorded", comparison.run.release
    lines = [] if same_gpu(recorded, release.hardware) else [f"{recorded}; the coefficients are for {release.hardware}"]
    lines = [f"hardware: {line}" for line in lines]
    dtype, entry = comparison.recording.served_dtype, comparison.run.entry
    own = fit_words(comparison) == "fitted on this run"
    if dtype is not None and dtype not in _SIXTEEN_BITS and entry is not None and entry.dtype is None and not own:
        lines.append(f"data type: {dtype}; the coefficients do not say theirs, and 16 bits are usual")
    return lines


def status_text(comparison: Comparison, verdict: str) -> str:
    """What passed or failed, without the status word; ``verdict``: the sentence for any other verdict."""
    if comparison.overloaded and comparison.capacity and comparison.verdict in ("pass", "fail"):
        return _served(comparison)
    if comparison.verdict == "pass":
        judged = [METRIC_NAMES[m] for m in THRESHOLDS if comparison.metrics[m]["mean"].error is not None]
        return f"mean {_listed(judged)} within limits"
    if comparison.verdict == "fail":
        failed = comparison.failed_thresholds
        if len(failed) == 1:
            return f"mean {_predicted(comparison, failed[0])}"
        errors = (f"{METRIC_NAMES[metric]} {percent(comparison.metrics[metric]['mean'].error)}" for metric in failed)
        return f"mean {', '.join(errors)} beyond limits"
    return verdict.removeprefix("not decided: ")


def _status(comparison: Comparison, verdict: str, tone: Tone) -> Line:
    word = comparison.verdict.upper()
    return Line(f"{word}  {comparison.alias}: {status_text(comparison, verdict)}", mark=Toned(word, tone))


def _served(comparison: Comparison) -> str:
    """What an overloaded run is judged by, the largest error for its limit."""
    measures = sorted(comparison.capacity or (), key=lambda m: -abs(m.error) / comparison.limit(m))
    shown = ", ".join(f"{m.name} {percent(m.error)} (limit ±{100 * comparison.limit(m):.3g} %)" for m in measures[:2])
    of = "" if comparison.selection.everything else " in the whole run"
    return f"overloaded, judged by what was served{of}: {shown}" + (" and others" if len(measures) > 2 else "")


def _predicted(comparison: Comparison, metric: str) -> str:
    error = comparison.metrics[metric]["mean"].error or 0.0
    side = "over" if error > 0 else "under"
    limit = cell_text(comparison.limit(metric), "limit")
    return f"{METRIC_NAMES[metric]} {side}-predicted by {percent(abs(error)).lstrip('+')} (limit {limit})"


def _tail_mark(comparison: Comparison) -> list[Line]:
    if comparison.overloaded or comparison.verdict not in ("pass", "fail"):
        return []
    lines = []
    if off := tail_errors(comparison):
        shown = ", ".join(f"{METRIC_NAMES[metric]} {percent(error)}" for metric, error in off.items())
        lines.append(Line(f"TAIL OFF  p99 error: {shown} (reported, not gated)", mark=Toned("TAIL OFF", "caution")))
    for metric, error in tail_errors(comparison, "not decided").items():
        name, ranged = METRIC_NAMES[metric], _drawn_range(comparison, (metric, "p99"))
        shown = f"{name} {percent(error)}, {ranged} by when each request came"
        lines.append(Line(f"TAIL OPEN  p99 error: {shown}", mark=Toned("TAIL OPEN", "caution")))
    return lines


def _drawn_range(comparison: Comparison, cell: MetricStatistic) -> str:
    draws = comparison.draws
    if draws is None:
        raise ValueError("only reconstructions leave a tail open")
    low, _, high = draws.range_of(cell)
    return f"{percent(low)} to {percent(high)}"


def _basis(comparison: Comparison) -> str:
    run = comparison.run
    kind = "" if comparison.ground_truth == "recorded" else "reconstructed "
    by = "" if run.simulator == "embedded" else f"simulator {run.simulator}, "
    mode = "" if run.mode.name == "exact" else f"; replay {run.mode.name}"
    return f"{counted(comparison.requests, f'{kind}request')}; {by}{run.release.name}, {fit_words(comparison)}{mode}"


def fit_words(comparison: Comparison) -> str:
    """What the coefficients were fitted on, as far as this run is concerned."""
    return _USES.get(comparison.uses, comparison.uses)


def _row(comparison: Comparison, metric: str) -> list[Cell]:
    cells = comparison.metrics[metric]
    mean = cells["mean"]
    observed: Cell = "unusable" if mean.unusable else mean.a_us  # the line of the instrument checks says by which
    limit, tails = comparison.limit(metric), [cells[name].error for name in ("p50", "p90", "p99")]
    if comparison.overloaded:  # these measure how long the queue has grown
        errors: list[Cell] = [mean.error, "-", *tails]
    else:
        toned = (_toned(error, TAIL_LIMITS[metric], "caution") for error in tails)
        errors = [_toned(mean.error, limit, "bad"), cell_text(limit, "limit"), *toned]
    return [METRIC_NAMES[metric], observed, mean.b_us, *errors]


def _toned(error: float | None, limit: float, beyond: Tone) -> Cell:
    """An error in the colour of its size."""
    if error is None:
        return None
    return Toned(error, beyond) if abs(error) > limit else Toned(error, "good")


def _warnings(comparison: Comparison) -> list[Part]:
    """What the numbers depend on and nobody recorded, and who is not in them; nothing for most recordings."""
    left_out, beyond, saturated = sum(comparison.excluded.values()), comparison.run.outside, comparison.saturation
    return [
        *(saturation_block(saturated).parts[:1] if saturated and saturated.from_us is not None else ()),
        *([draws_sentence(comparison)] if comparison.verdict == "not decided" else ()),
        *([noise_sentence(comparison)] if comparison.noise else ()),
        *promised_lines(comparison),
        *other_hardware(comparison),
        *([str(comparison.warming)] if comparison.warming else ()),
        *([f"extrapolated: {beyond}"] if beyond is not None and beyond.matters else ()),
        *argument_lines(comparison.recording, comparison.open_arguments),
        *([f"left out: {counted(left_out, 'request')}"] if left_out else []),
    ]


def _changed(findings: Sequence[Finding]) -> list[str]:
    """The findings that changed or removed a number, in one line."""
    named = []
    for severity in ("unusable", "corrected"):
        checks = dict.fromkeys(_named(finding) for finding in findings if finding.severity == severity)
        named += [f"{severity}: {', '.join(checks)}"] if checks else []
    return [f"instrument checks: {'; '.join(named)}"] if named else []


def _named(finding: Finding) -> str:
    of = METRIC_NAMES.get(finding.metric or "", "")
    return f"{finding.check} ({of})" if of else finding.check


def _next(comparison: Comparison, again: str) -> str:
    """The command that a reader of this page wants next.

    Causes of latencies that measure a queue are those of the queue.  So of a server that saturates it is the same
    comparison before that, or what is known of its overload.
    """
    if command := before_the_queue(comparison, again):
        return command
    if saturated(comparison):
        check = f" --check {CHECK}" if comparison.overloaded else ""
        return f"blis-replay inspect {quote(comparison.alias)}{of_store(again)}{check}"
    if comparison.verdict == "fail" or tail_errors(comparison):
        return f"blis-replay explain {quote(comparison.alias)}{again}"
    if comparison.verdict == "pass":
        return f"blis-replay report {quote(comparison.alias)}{again} --out report.html"
    return f"blis-replay inspect {quote(comparison.alias)}{of_store(again)}"


def of_store(options: str) -> str:
    """Of options that a command repeats the store: not every verb takes coefficients."""
    _, found, store = options.partition(" --store ")
    return f"{found}{store}"


def saturated(comparison: Comparison) -> bool:
    """Whether the server queued so long, from some second on, that its latencies say nothing of a component."""
    queued = comparison.saturation is not None and comparison.saturation.observed.from_us is not None
    return not comparison.is_before_the_queue and (queued or comparison.overloaded)


def before_the_queue(comparison: Comparison, again: str = "") -> str:
    """The command that compares what came before the server saturated; empty if it did not, or too little came."""
    found = comparison.saturation
    if not saturated(comparison) or found is None or not found.share_before:
        return ""
    return f"blis-replay validate {quote(comparison.alias)}{again} --window 0:{found.share_before:g}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""
