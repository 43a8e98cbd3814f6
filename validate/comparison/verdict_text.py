"""A judgement in words and cells."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from blis_replay.ingest.recording import RECORDED
from blis_replay.ingest.tables import Cell, Tone, Toned
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.judgement import Command, Judgement, Quantity
from blis_replay.validate.metrics.latency import METRIC_NAMES
from blis_replay.validate.text.answer import Line
from blis_replay.validate.text.cells import percent

_USES = {"unknown": "fitted on unknown runs", "fitted on its steps": "fitted on this run"}
_TONES: Mapping[str, Tone] = {"pass": "good", "fail": "bad", "within": "good", "beyond": "bad"}


def verdict_tone(verdict: str) -> Tone:
    """The tone of a verdict or an outcome."""
    return _TONES.get(verdict, "caution")


def fit_words(uses: str) -> str:
    """What the coefficients were fitted on, as far as this run is concerned."""
    return _USES.get(uses, uses)


def command_text(command: Command, options: str = "") -> str:
    """A command as it is typed; ``options`` of the command line that it repeats, its store last."""
    _, store, where = options.partition(" --store ")
    repeated = options if command.of_release else f"{store}{where}"
    return f"blis-replay {command.verb} {quote(command.alias)}{repeated}{command.more}"


def held_text(quantity: Quantity) -> str:
    """An error beside its limit."""
    return f"{quantity.name} {percent(quantity.error)} (limit ±{100 * quantity.limit:.3g} %)"


def beyond_fit(judgement: Judgement) -> str:
    """How much steps outside of what the coefficients were fitted on leave open."""
    return f"steps beyond the fit may move the mean by ±{100 * judgement.unsure:.0f} %"


def verdict_words(comparison: Comparison) -> tuple[str, str, str]:
    """The verdict, why it is none (or nothing), and the errors that it rests on (or nothing)."""
    judgement = comparison.judgement
    if judgement.lost or (judgement.overloaded and not judgement.judged):
        return "could not be judged", why_not_judged(comparison), ""
    what = "overloaded, so judged by what was served" if judgement.overloaded else "errors of the mean"
    errors = f"({what}: {', '.join(map(held_text, judgement.judged))})"
    if judgement.verdict == "not decided":
        if judgement.open_by_fit:
            return "not decided", beyond_fit(judgement), errors
        return "not decided by this reconstruction", "", errors
    if judgement.verdict == "unusable":
        return "could not be judged", _refused(judgement), errors
    also = f"; not judged: {_refused(judgement)}" if judgement.refused else ""
    return judgement.verdict, "", errors + also


def verdict_sentence(comparison: Comparison) -> str:
    """The verdict with the errors that it rests on."""
    verdict, why, errors = verdict_words(comparison)
    return f"{verdict}{why and f': {why}'}{errors and f' {errors}'}"


def verdict_line(comparison: Comparison) -> Line:
    """The same in its tone."""
    verdict = f"verdict: {verdict_words(comparison)[0]}"
    return Line(f"verdict: {verdict_sentence(comparison)}", mark=Toned(verdict, verdict_tone(comparison.verdict)))


def _refused(judgement: Judgement) -> str:
    return "; ".join(f"{METRIC_NAMES[metric]} unusable ({why})" for metric, why in judgement.refused.items())


def why_not_judged(comparison: Comparison) -> str:
    """Why a run has no verdict."""
    judgement = comparison.judgement
    if judgement.lost:
        return "; ".join(judgement.lost)
    if judgement.verdict == "unusable":
        return _refused(judgement)
    if comparison.ground_truth != RECORDED:
        nothing = "requests that failed are not known, so the load cannot be replayed"
    elif comparison.selection.stage is not None:
        nothing = "a load stage by itself is not judged"
    else:
        nothing = "too few requests were served to judge by"
    return f"overloaded, and {nothing}"


def toned_error(quantity: Quantity) -> Cell:
    """An error in the tone of its state."""
    return None if quantity.error is None else Toned(quantity.error, verdict_tone(quantity.state))


def error_cell(comparison: Comparison, metric: str, statistic: str) -> Cell:
    """One error; that of a mean that is beyond its limit stands out."""
    error = comparison.metrics[metric][statistic].error
    beyond = {(quantity.key, quantity.statistic) for quantity in comparison.judgement.beyond}
    return Toned(error, "bad") if (metric, statistic) in beyond and not comparison.overloaded else error


def marked(sentence: str, code: str) -> Line:
    """A remark; that of saturation stands out."""
    return Line(sentence, mark=Toned("saturation:", "caution") if code == "saturation" else None)
