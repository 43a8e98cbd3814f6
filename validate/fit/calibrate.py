"""Coefficients from recordings: a release with one entry per model, and the record of each fit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import numpy as np

from blis_replay.base.engine_packs import known_release
from blis_replay.base.errors import ReleaseError, ValidateError, counted, exists_already
from blis_replay.base.files import write_whole
from blis_replay.blis.latency.gpu_names import same_gpu
from blis_replay.blis.latency.models import (
    Latency,
    LatencyModel,
    Lifecycle,
    PrefillBeyond,
    RegimeModel,
    Roofline,
)
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, OtherForm, Scheduling, StepRange, Told
from blis_replay.blis.releases.release import (
    DELAYS,
    UNKNOWN_HARDWARE,
    CoefficientRelease,
    FittedOn,
    ModelEntry,
    format_release,
    parse_release,
)
from blis_replay.ingest.identity import requests_hash, sketch_of
from blis_replay.ingest.recording import RECORDED, Recording
from blis_replay.ingest.store import Store, list_experiments, read_stored
from blis_replay.replay.engine import cache_groups_of, layers_in_words
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import page_of_text
from blis_replay.replay.simulator import model_of
from blis_replay.replay.warm_up import Stalls
from blis_replay.validate.experiment import WILDCARDS, select_experiments
from blis_replay.validate.fit.cycle_rows import COEFFICIENTS
from blis_replay.validate.fit.every_step import Measured, measure, was_recorded
from blis_replay.validate.fit.evidence import (
    SCALE,
    Gathered,
    SchedulingEvidence,
    cold_start_of,
    configured_scheduling,
    gather,
    is_load_level,
    known_architecture,
    measured_delays,
    scheduling_evidence,
)
from blis_replay.validate.fit.linear import Prior
from blis_replay.validate.fit.model_fit import Basis, Fitted, Start, choose_form, fit_form, line_start, prior_for
from blis_replay.validate.fit.next_recording import NextRecording, next_recording
from blis_replay.validate.fit.refused import (
    DATA_WORDS,
    Data,
    DataChoice,
    refuse_impossible,
    used_data,
    why_not_fitted,
)
from blis_replay.validate.fit.scores import Edges, first_use_of, missed, part_scores, with_stalls
from blis_replay.validate.fit.step_form import BELIEVED, PREFILL, SOME_EXPERTS, SOME_PER_TOKEN, StepForm
from blis_replay.validate.metrics.resampling import SEED
from blis_replay.validate.run_mark import run_mark, same_run

Split = tuple[float, float]

# Fit to the first 60 %, choose by the next 20 %, test on the last 20 %.
DEFAULT_SPLIT: Split = (0.6, 0.8)


@dataclass(frozen=True)
class Options:
    """How to calibrate.

    ``prior``: for coefficients that the recordings do not determine.  ``window``: the share of each run to use, by
    time; ``split``: shares of that window, until where to fit and to choose the form (equal: no choice of form).
    """

    prior: CoefficientRelease
    data: DataChoice = "auto"
    split: Split = DEFAULT_SPLIT
    seed: int = SEED
    window: Split = (0.0, 1.0)

    @property
    def edges(self) -> Edges:
        """Shares of a run: the window's begin, until where to fit, until where to choose the form, the window's end."""
        begin, end = self.window
        fitted_until, chosen_until = (begin + share * (end - begin) for share in self.split)
        return begin, fitted_until, chosen_until, end


@dataclass(frozen=True)
class ModelFit:
    """A fitted model: its entry, the data used from each recording, and how well it agrees.

    ``rows``: windows (or steps) fitted to; ``agreement``: mean absolute error of a window in percent, by ``cycle``,
    ``e2e``, ``ttft``.  ``scheduling``: None without latencies.  ``missed``: training data that it misses by more than
    allowed, in words.  ``remarks``: in words, what was left out, and limits of the scores.
    ``next``: what to record next.
    """

    entry: ModelEntry
    record: FitRecord
    used: tuple[tuple[Recording, Data], ...]
    rows: int
    agreement: dict[str, float]
    scheduling: SchedulingEvidence | None
    missed: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    next: NextRecording | None = None


def training_recordings(
    store: Store, selectors: Sequence[str], data: DataChoice = "auto"
) -> tuple[list[Recording], list[str]]:
    """The selected recordings, and the reasons for those that are left out.

    A pattern selects only recorded requests that may be fitted to, if it matches any.  Raises
    ``UnknownExperimentError`` as ``select_experiments`` does.
    """
    chosen: dict[str, Recording] = {}
    left_out: dict[str, str] = {}
    for selector in selectors:
        matched = [read_stored(store, slug) for slug in select_experiments(store, [selector])]
        if set(selector) & WILDCARDS:
            others = [r for r in matched if r.ground_truth != RECORDED]
            others = others if len(others) < len(matched) else []
            refused = dict.fromkeys(
                (r.slug for r in others), f"{', '.join(r.alias for r in others)}: no requests recorded"
            )
            of_requests = [r for r in matched if r.slug not in refused]
            refused |= {r.slug: why for r in of_requests if (why := why_not_fitted(r, data)) is not None}
            if len(refused) < len(matched):
                matched = [recording for recording in matched if recording.slug not in refused]
                left_out |= refused
        chosen |= {recording.slug: recording for recording in matched}
    return list(chosen.values()), [*dict.fromkeys(why for slug, why in left_out.items() if slug not in chosen)]


def judged_next(store: Store, fitted: Sequence[Recording]) -> str:
    """The alias of another recording of a server that was fitted to, to judge the fit by; else of the first.

    Another load comes first, as the same one says nothing of others; then the one whose name begins most alike, which
    is likely of the same day.
    """
    used = {recording.slug for recording in fitted}
    servers = {(r.model, r.tensor_parallelism, r.hardware) for r in fitted}
    others = [
        row
        for row in list_experiments(store)
        if (row.model, row.tensor_parallelism, row.hardware) in servers
        if row.slug not in used and row.ground_truth == RECORDED and not (row.overloaded or row.unusable)
    ]
    loads = dict(store.connection.execute(_LOADS).fetchall())
    fitted_to = {loads.get(slug) for slug in used}
    others.sort(key=lambda row: (loads.get(row.slug) not in fitted_to, _begins_alike(row.slug, used)), reverse=True)
    marks = [run_mark(recording) for recording in fitted]
    for row in others:
        own = run_mark(read_stored(store, row.slug))
        if not any(same_run(mark, own) for mark in marks):
            return row.alias
    return fitted[0].alias


# Recordings of the same prompts at the same rate, to a tenth, are of one load; answers may end elsewhere.
_LOADS = """
SELECT slug, (bit_xor(hash(request_index, prompt_tokens)), round(10 * log10(greatest(max(arrival_us), 1) / count(*))))
FROM requests GROUP BY slug
"""


def _begins_alike(name: str, others: Iterable[str]) -> int:
    alike = (takewhile(lambda two: two[0] == two[1], zip(name, other, strict=False)) for other in others)
    return max(len(list(one)) for one in alike)


def calibrate(
    recordings: Sequence[Recording],
    name: str,
    options: Options,
    source: str = "fitted by blis-replay calibrate",
    **pool: Unpack[Pool],
) -> tuple[CoefficientRelease, list[ModelFit]]:
    """Fit every model of the recordings and make a release of the fits.

    A model of ``groups_of`` is a job of the ``pool`` (see ``map_jobs``).  Equal input and seed give an equal release,
    whatever the pool.  Raises ``ValidateError`` as ``fit_model``, and for recordings of several kinds of GPU.
    """
    _refuse_two_gpus(recordings)
    fitted = map_jobs(partial(_fit_and_next, options=options), groups_of(recordings), **pool)
    fits = sorted(fitted, key=lambda fit: fit.entry.model)
    summary = f"Step times and delays fitted to {', '.join(recording.alias for recording in recordings)}."
    fitted_on = stated_fits(used for fit in fits for used in fit.used)
    return fitted_release(name, summary, source, recordings, [fit.entry for fit in fits], fitted_on), fits


@dataclass(frozen=True)
class CalibratedFile:
    """Fits and the file of their release, ``written`` or not; ``replaced``: the hash of an earlier release there."""

    path: str
    fits: Sequence[ModelFit]
    written: bool
    replaced: str | None = None


def calibrate_to(
    out: Path,
    name: str,
    recordings: Sequence[Recording],
    fitted: Callable[[], tuple[CoefficientRelease, Sequence[ModelFit]]],
    *,
    force: bool = False,
) -> CalibratedFile:
    """Write the release of ``fitted`` to ``out``; without ``force`` not if a fit misses its own training data.

    Without ``force`` raises ``FileExistsAlreadyError``, before it fits, as ``replaced_release``.
    """
    earlier = None if force else replaced_release(out, name, [model_of(recording) for recording in recordings])
    release, fits = fitted()
    written = force or not any(fit.missed for fit in fits)
    if written:
        write_whole(out, format_release(release))
    replaced = earlier.sha256 if earlier is not None and written and earlier.sha256 != release.sha256 else None
    return CalibratedFile(str(out), fits, written, replaced)


def stated_fits(used: Iterable[tuple[Recording, Data]]) -> list[FittedOn]:
    """The recordings that a release states as its training data, each with one sketch."""
    stated: dict[tuple[str, Data], FittedOn] = {}
    for recording, kind in used:
        sketch = None if any(slug == recording.slug for slug, _ in stated) else sketch_of(recording)
        hashes = recording.content_hash, kind, requests_hash(recording) or None
        version = recording.engine.get("vllm_version")
        served_by = str(version.value) if version is not None and known_release(version.value) else None
        layers = layers_in_words(cache_groups_of(recording))
        stated[recording.slug, kind] = FittedOn(recording.slug, *hashes, sketch, served_by, layers, run_mark(recording))
    return list(stated.values())


def groups_of(recordings: Sequence[Recording]) -> list[list[Recording]]:
    """Recordings by model, tensor parallelism and data type of the weights, each group in the order given.

    A recording without a data type joins the others of its model if these state one.  Raises ``ValidateError`` if they
    state several.
    """
    groups: dict[tuple[str, int | None, str | None], list[Recording]] = {}
    for recording in recordings:
        model, parallelism = model_of(recording), recording.tensor_parallelism
        alike = (r for r in recordings if (model_of(r), r.tensor_parallelism) == (model, parallelism))
        said = sorted(filter(None, {one.served_dtype for one in alike}))
        dtype = recording.served_dtype or (said[0] if len(said) == 1 else None)
        if dtype is None and said:
            raise ValidateError(
                f"{recording.alias}: does not say its data type, and others of {model} were served in "
                f"{' and '.join(said)}; say it with `ingest --engine FILE` (dtype), or calibrate it by itself"
            )
        groups.setdefault((model, parallelism, dtype), []).append(recording)
    return list(groups.values())


def common_dtype(recordings: Sequence[Recording]) -> str | None:
    """The data type of all of these; None if one does not state it."""
    said = {recording.served_dtype for recording in recordings}
    return said.pop() if len(said) == 1 else None


def fitted_release(
    name: str,
    summary: str,
    source: str,
    recordings: Sequence[Recording],
    models: Sequence[ModelEntry],
    fitted_on: Sequence[FittedOn],
) -> CoefficientRelease:
    """A release of fitted entries, with the hardware of ``recordings`` and the hash of its own text.

    Raises ``ReleaseError`` for coefficients that no release may have.
    """
    hardware = ", ".join(sorted({recording.hardware or UNKNOWN_HARDWARE for recording in recordings}))
    release = CoefficientRelease(
        name, "valid", summary, source, hardware, models=tuple(models), fitted_on=tuple(fitted_on)
    )
    text = format_release(release)
    parse_release(text, f"the fitted release {name}")  # what nobody could read is not written
    return replace(release, sha256=hashlib.sha256(text.encode()).hexdigest())


def _refuse_two_gpus(recordings: Sequence[Recording]) -> None:
    """Raise ``ValidateError`` for recordings of several kinds of GPU: a release has the step times of one."""
    kinds: dict[str, list[str]] = {}
    for recording in recordings:
        name = recording.hardware
        if name is not None:
            alike = next((kind for kind in kinds if same_gpu(kind, name)), name)
            kinds.setdefault(alike, []).append(recording.alias)
    if len(kinds) > 1:
        named = "; ".join(f"{kind}: {', '.join(aliases)}" for kind, aliases in kinds.items())
        raise ValidateError(f"the recordings are of {len(kinds)} kinds of GPU ({named}); calibrate each by itself")


def _fit_and_next(recordings: Sequence[Recording], options: Options) -> ModelFit:
    fit = fit_model(recordings, options)
    return replace(fit, next=next_recording(fit.entry, [recording for recording, _data in fit.used]))


def fit_model(recordings: Sequence[Recording], options: Options) -> ModelFit:
    """Fit one model from its recordings.

    ``auto`` uses step cycles and latencies.  Where every step is known, form and coefficients are measured without a
    search.  Raises ``ValidateError`` without data, for fewer windows than coefficients, without prompt lengths, for
    data that a check calls unusable, and for coefficients that no server has.
    """
    used = used_data(recordings, options.data)
    begin, _fitted_until, until, _end = options.edges
    line = None if options.data == "latencies" else measure(recordings, (begin, until), options.seed)
    fit = _searched(recordings, used, options) if line is None else _measured(recordings, line, options)
    scores, latencies = fit.record.scores, {"e2e": 0.0}
    later = missed(scores, latencies, recordings, later=True)
    unlike = (f"{'; '.join(later)}: what came later is not served like what was fitted",) if later else ()
    return replace(fit, remarks=fit.remarks + unlike + refuse_impossible(fit.record, recordings))


def _searched(recordings: Sequence[Recording], used: tuple[tuple[Recording, Data], ...], options: Options) -> ModelFit:
    """The fit through simulated runs: a line, then the form that the next part of the split prefers."""
    begin, fitted_until, chosen_until, _end = options.edges
    measured = measured_delays(recordings, options.seed)
    basis = Basis(prior_for(options.prior, recordings[0]), measured, options.seed)
    gathered = _gathered(recordings, (begin, fitted_until), options)
    scheduling, fitted, start = _first_fit(recordings, gathered, basis, options)
    asynchronous = (scheduling.used if scheduling else configured_scheduling(recordings[0])[0]) == "asynchronous"
    gathered = gathered.with_scheduling(asynchronous)
    others: tuple[Fitted, ...] = ()
    if chosen_until > fitted_until:
        later = _gathered(recordings, (fitted_until, chosen_until), options, needed=False).with_scheduling(asynchronous)
        # Load levels have no later windows: there the forms are compared on the data that they were fitted to.
        judges = later if later.parts else gathered
        fitted, others = choose_form(gathered, judges, fitted, start, basis, believed_rooflines(recordings[0]))
        gathered = _gathered(recordings, (begin, chosen_until), options).with_scheduling(asynchronous)
        restart = replace(start.for_form(fitted.form), vector=fitted.minimum.vector)
        fitted = fit_form(gathered, fitted.form, restart, basis, everywhere=True)
    fitted, stalled_us = with_stalls(gathered, fitted)
    vector, form, coefficients = fitted.minimum.vector, fitted.form, _coefficients(fitted, measured, stalled_us, others)
    delays = with_sources(basis.delays, coefficients, ("pre_queue", "post_request"))
    entry = _entry(recordings, form.latency(vector), form.lifecycle(vector, delays))
    if (kernels := first_use_of(recordings, entry, scheduled(asynchronous))) is not None:
        entry, coefficients = replace(entry, first_use=kernels[0]), (*coefficients, kernels[1])
    singles = [recording for recording in recordings if not is_load_level(recording)]
    stalls = {r.slug: cold for r in singles if (cold := cold_start_of(r)) is not None}
    scored = partial(
        scored_fit,
        recordings,
        form=form.name,
        edges=options.edges,
        asynchronous=asynchronous,
        why=(scheduling.told, scheduling.text) if scheduling else ("not told apart", "no latencies to tell it from"),
        stalls=stalls,
        correlation=fitted.bounds.correlation,
    )
    record = scored(entry=entry, coefficients=coefficients)
    of_this_gpu = same_gpu(options.prior.hardware, recordings[0].hardware or "")
    more = _beyond(record.steps, basis.priors[PREFILL], float(vector[PREFILL])) if of_this_gpu else None
    if more is not None and isinstance(entry.latency, LatencyModel | RegimeModel):
        entry = replace(entry, latency=replace(entry.latency, prefill_beyond=more[0]))
        record = scored(entry=entry, coefficients=(*coefficients, more[1]))
    record = replace(record, other_forms=tuple(_other_form(other, delays) for other in others))
    residuals, kinds = gathered.residuals(form, basis.delays, vector), gathered.kinds()
    agreement = {
        metric: float(100 * scale * np.abs(residuals[kinds == kind]).mean())
        for kind, (metric, scale) in enumerate(SCALE.items())
        if (kinds == kind).any()
    }
    return ModelFit(
        entry=replace(entry, fit=record),
        record=record,
        used=used,
        rows=gathered.windows,
        agreement=agreement,
        scheduling=scheduling,
        missed=missed(record.scores, agreement, recordings),
        remarks=_left_out(recordings, stalls),
    )


def believed_rooflines(recording: Recording) -> tuple[Roofline, ...]:
    """Rooflines to try on a recording, with the experts of its model; of an unknown model without and with some."""
    architecture = known_architecture(recording)
    if architecture is None:
        return BELIEVED, replace(BELIEVED, experts=SOME_EXPERTS, experts_per_token=SOME_PER_TOKEN)
    return (replace(BELIEVED, experts=architecture.experts, experts_per_token=architecture.experts_per_token),)


# Weight of the form that was not used, if the recordings fit both.  Beyond the fit both are guesses, but a GPU reads
# and computes at the same time.
_OTHER_BELIEVED = 0.25


def _other_form(other: Fitted, delays: Lifecycle) -> OtherForm:
    """A form that fits the recordings as well as the one used."""
    form, vector = other.form, other.minimum.vector
    return OtherForm(form.name, _OTHER_BELIEVED, form.latency(vector), form.lifecycle(vector, delays))


def _entry(recordings: Sequence[Recording], latency: Latency, lifecycle: Lifecycle) -> ModelEntry:
    """The entry of a release for the model of these recordings."""
    return ModelEntry(
        model=model_of(recordings[0]),
        tensor_parallelism=recordings[0].tensor_parallelism or 1,
        dtype=common_dtype(recordings),
        latency=latency,
        lifecycle=lifecycle,
    )


def _left_out(recordings: Sequence[Recording], stalls: Mapping[str, Stalls]) -> tuple[str, ...]:
    """In words, the steps that were held up, for which no coefficient stands.  ``stalls``: by slug."""
    return tuple(
        f"{recording.alias}: {counted(len(held.at_us), 'step')} took {held.longer_us.sum() / 1e6:.1f} s longer "
        f"than the batch explains, {'the last ' if len(held.at_us) > 1 else ''}at {held.at_us[-1] / 1e6:.1f} s: not in "
        "the fit, replayed in the scores"
        for recording in recordings
        if (held := stalls.get(recording.slug)) is not None
    )


def with_sources(lifecycle: Lifecycle, coefficients: Sequence[CoefficientFit], names: Sequence[str]) -> Lifecycle:
    """The delays, those of ``names`` with the origin of their values."""
    sources: dict[str, Any] = {f"{fit.name}_source": fit.remark for fit in coefficients if fit.name in names}
    return replace(lifecycle, **sources)


def _beyond(steps: StepRange | None, prior: Prior, fitted_us: float) -> tuple[PrefillBeyond, CoefficientFit] | None:
    """The extra cost of a prefill token in batches larger than those fitted on, by the prior; and its record.

    None where the fitted cost is as high: a token gets no cheaper as a batch grows.
    """
    prior_us = prior.value
    most = int(steps.prefill_tokens[1]) if steps is not None else 0
    if not most or prior_us <= fitted_us:
        return None
    remark = f"no step fitted on has more prefill tokens; {prior.why}"
    fit = CoefficientFit(f"per_prefill_token_above_{most}", prior_us, prior_us, prior_us, "prior", remark)
    return PrefillBeyond(most, round(1000 * (prior_us - fitted_us))), fit


def scored_fit(
    recordings: Sequence[Recording],
    entry: ModelEntry,
    form: str,
    edges: Edges,
    asynchronous: bool,
    why: tuple[Told, str],
    coefficients: tuple[CoefficientFit, ...],
    stalls: Mapping[str, Stalls] = MappingProxyType({}),
    correlation: tuple[tuple[float, ...], ...] = (),
) -> FitRecord:
    """The record of a fitted entry, with its scores; ``why``: the scheduling mode that was identified, and evidence."""
    scores, steps = part_scores(recordings, entry, scheduled(asynchronous), edges, stalls)
    mode: Scheduling = "asynchronous" if asynchronous else "synchronous"
    return FitRecord(form, *edges[1:3], mode, *why, coefficients, scores, steps, correlation)


def scheduled(asynchronous: bool, **forced: Any) -> ReplayMode:
    """A replay mode with this scheduling."""
    return ReplayMode(scheduling="asynchronous" if asynchronous else "synchronous", **forced)


def _measured(recordings: Sequence[Recording], line: Measured, options: Options) -> ModelFit:
    """The fit of recordings with every step, over all but the last part of the split.

    Steps that were held up are left out of the fit, and the scores replay them.  A fit may still miss its own means,
    but not with the recorded step times: then the pace of the machine changed, no engine argument is wrong, and the fit
    has the mean pace.
    """
    begin, _fitted_until, until, end = options.edges
    edges = begin, until, until, end
    entry = _entry(recordings, line.latency, with_sources(line.lifecycle, line.coefficients, DELAYS))
    why = "the recorder has it from the engine" if all(map(was_recorded, recordings)) else "an engine argument"
    mode: tuple[Told, str] = ("not told apart", why)
    record = scored_fit(
        recordings, entry, line.form, edges, False, mode, line.coefficients, line.stalls, line.correlation
    )
    remarks = _left_out(recordings, line.stalls)
    record = replace(record, scatter=line.scatter)
    # Single steps scatter more than windows of them, so only the scores tell whether the fit misses its own data.
    own = missed(record.scores, {"e2e": 0.0}, recordings)
    if own and all(map(was_recorded, recordings)):
        at_pace, _steps = part_scores(recordings, entry, scheduled(False, step_time="recorded"), edges)
        if not missed(at_pace, {"e2e": 0.0}, recordings):
            off = "; ".join(own)
            because = "so no engine argument is wrong: the pace changed in this run, or steps take another form"
            remarks += (f"{off}. With the recorded step times it is not off, {because}",)
            own = ()
    return ModelFit(
        entry=replace(entry, fit=record),
        record=record,
        used=tuple((recording, "steps") for recording in recordings),
        rows=line.steps,
        agreement={"cycle": 100 * line.error},
        scheduling=None,
        missed=own,
        remarks=remarks,
    )


def _first_fit(
    recordings: Sequence[Recording], gathered: Gathered, basis: Basis, options: Options
) -> tuple[SchedulingEvidence | None, Fitted, Start]:
    """The scheduling mode that the latencies identify, the line under the mode to use, and where its search began."""
    start = line_start(recordings, options.edges[:2], basis, gathered)
    if not gathered.latencies:
        return None, fit_form(gathered, StepForm(), start, basis), start
    modes = {"asynchronous": gathered.with_scheduling(True), "synchronous": gathered.with_scheduling(False)}
    # A wait that grows with the batch looks much like one more cycle, so the modes are compared without it.
    plain = replace(start, first_token_waits=False)
    lines = {mode: fit_form(part, StepForm(), plain, basis).minimum for mode, part in modes.items()}
    configured = configured_scheduling(recordings[0])
    scheduling = scheduling_evidence(gathered, [*lines.values()], configured, options.seed)
    restart = replace(start, vector=lines[scheduling.used].vector)
    return scheduling, fit_form(modes[scheduling.used], StepForm(), restart, basis), restart


def _gathered(
    recordings: Sequence[Recording], window: tuple[float, float], options: Options, *, needed: bool = True
) -> Gathered:
    gathered = gather(
        recordings,
        window,
        steps=options.data != "latencies",
        latencies=options.data != "steps",
        # A load level has no time within it, so all of it is for the fit.
        levels=window[0] == options.window[0],
    )
    rows = gathered.windows
    if needed and rows < COEFFICIENTS:
        names = ", ".join(recording.alias for recording in recordings)
        if all(map(is_load_level, recordings)):
            raise ValidateError(
                f"{names}: only a summary tells latencies, and {counted(rows, 'load level')} cannot determine "
                f"{COEFFICIENTS} coefficients; add some with other loads and lengths, or fit operator times to them: "
                "--operators"
            )
        raise ValidateError(
            f"{names}: {counted(rows, 'window')} of {DATA_WORDS[options.data]} between "
            f"{window[0]:.0%} and {window[1]:.0%} of the run cannot determine {COEFFICIENTS} coefficients; use a wider "
            "--split or more recordings"
        )
    return gathered


def _coefficients(
    fitted: Fitted, measured: dict[str, CoefficientFit], stalled_us: float, others: Sequence[Fitted]
) -> tuple[CoefficientFit, ...]:
    """The record of each coefficient, with bounds over all forms that fit the recordings equally well."""
    vector, bounds = fitted.minimum.vector, fitted.bounds
    fits = []
    for i, name in enumerate(fitted.form.names):
        status, remark = fitted.held.get(i, ("fitted", "fitted to step cycles and latencies"))
        low, high = float(bounds.low[i]), float(bounds.high[i])
        if name == "intercept" and stalled_us:
            remark = f"{remark}; {stalled_us:,.0f} us of it for stalls that recur, the bounds are without and with them"
        alike = [(other.bounds, other.form.names.index(name)) for other in others if name in other.form.names]
        if status == "measured":
            low, high = measured[name].low_us, measured[name].high_us
        elif status == "fitted":
            low = min([low, *(float(bounds.low[place]) for bounds, place in alike)])
            high = max([high, *(float(bounds.high[place]) for bounds, place in alike)])
        fits.append(CoefficientFit(name, *_in_digits(float(vector[i]), low, high), status, remark))
    if "post_request" in measured:
        delay = measured["post_request"]
        digits = _in_digits(delay.value_us, delay.low_us, delay.high_us)
        fits.append(CoefficientFit("post_request", *digits, "measured", delay.remark))
    return tuple(fits)


def _in_digits(value_us: float, low_us: float, high_us: float) -> tuple[float, float, float]:
    """A value and its bounds in significant digits: the last is at most a hundredth of the interval.

    Further digits differ between machines.  Without an interval six digits stay.
    """
    scale = (high_us - low_us) / 100 or abs(value_us) / 1e5
    decimals = max(-math.floor(math.log10(scale)), 0) if scale else 0
    return round(value_us, decimals), round(low_us, decimals), round(high_us, decimals)


def replaced_release(path: Path, name: str, models: Collection[str]) -> CoefficientRelease | None:
    """The release that would be lost if another were written there; None where nothing is, or a pipe or a device.

    Raises ``FileExistsAlreadyError`` for anything else than an earlier one of its name whose models it has as well.
    """
    if not path.is_file():
        return None
    try:
        earlier = parse_release(page_of_text(path, "coefficients"), str(path))
    except ReleaseError:
        raise exists_already(path) from None
    if earlier.name != name or not {entry.model for entry in earlier.models} <= set(models):
        raise exists_already(path)
    return earlier
