"""The verdict on a replay as a sentence, with what it rests on."""

from __future__ import annotations

import re

from blis_replay.ingest.recording import RECORDED
from blis_replay.ingest.tables import Tone, Toned
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.metrics.latency import METRIC_NAMES, THRESHOLDS
from blis_replay.validate.text.answer import Line
from blis_replay.validate.text.cells import percent, percent_plain


def verdict_tone(verdict: str) -> Tone:
    """The tone of a verdict or an outcome."""
    if verdict in ("pass", "fail"):
        return "good" if verdict == "pass" else "bad"
    return "caution"


def verdict_line(comparison: Comparison) -> Line:
    """The verdict as a page has it: the verdict itself in its tone."""
    sentence = verdict_sentence(comparison)
    verdict = re.match(r"verdict: [^(:,]*[^(:, ]", sentence)
    return Line(sentence, mark=Toned(verdict[0], verdict_tone(comparison.verdict)) if verdict else None)


def verdict_sentence(comparison: Comparison) -> str:
    """The verdict with the errors of the mean that it rests on."""
    if comparison.lost:
        return f"verdict: could not be judged: {'; '.join(comparison.lost)}"
    errors: list[tuple[str, float | None, float]]
    if comparison.overloaded:
        what = "overloaded, so judged by what was served"
        errors = [(measure.name, measure.error, comparison.limit(measure)) for measure in comparison.capacity or ()]
    else:
        what = "errors of the mean"
        errors = [(METRIC_NAMES[m], comparison.metrics[m]["mean"].error, comparison.limit(m)) for m in THRESHOLDS]
    judged = ", ".join(f"{name} {percent(error)} of ±{100 * limit:.3g} %" for name, error, limit in errors)
    if not judged:
        return f"verdict: could not be judged: overloaded, and {_nothing_served(comparison)}"
    refused = "; ".join(f"{METRIC_NAMES[m]} unusable ({why})" for m, why in comparison.unusable.items())
    if comparison.verdict == "not decided":
        return f"verdict: not decided by this reconstruction ({what}: {judged})"
    if comparison.verdict == "unusable":
        return f"verdict: could not be judged: {refused} ({what}: {judged})"
    also = f"; not judged: {refused}" if refused else ""
    return f"verdict: {comparison.verdict} ({what}: {judged}){also}"


def draws_sentence(comparison: Comparison) -> str:
    """Median and range of the errors of all reconstructions; empty where the requests were recorded."""
    draws = comparison.draws
    if draws is None or not draws.count:
        return ""
    ranges = {METRIC_NAMES[m]: draws.range_of((m, "mean")) for m in THRESHOLDS if (m, "mean") in draws.errors}
    named = [f"{m} {percent(mid)} ({percent(low)} to {percent(high)})" for m, (low, mid, high) in ranges.items()]
    return (
        f"When each request came was not published. {draws.count} reconstructions of it, median error of the mean "
        f"and range: {', '.join(named)}"
    )


def noise_sentence(comparison: Comparison) -> str:
    """What recordings of this load differ by, and which errors are no larger; empty without repeats."""
    noise = comparison.noise
    if noise is None:
        return ""
    apart = {m: noise.apart[m, "mean"] for m in THRESHOLDS if (m, "mean") in noise.apart}
    named = ", ".join(f"{METRIC_NAMES[m]} {percent_plain(value)}" for m, value in apart.items())
    errors = {m: comparison.metrics[m]["mean"].error for m in apart}
    within = [METRIC_NAMES[m] for m, error in errors.items() if error is not None and abs(error) <= apart[m]]
    said = f"; the error of {', '.join(within)} is no larger" if within else ""
    return (
        f"{len(noise.recordings)} recordings of this load differ in the mean by up to {named} "
        f"({', '.join(noise.recordings)}); no error below that is a failure{said}"
    )


def _nothing_served(comparison: Comparison) -> str:
    if comparison.ground_truth != RECORDED:
        return "requests that failed are not known, so the load cannot be replayed"
    if comparison.selection.stage is not None:
        return "a load stage by itself is not judged"
    return "too few requests were served to judge by"
