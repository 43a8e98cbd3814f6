"""Recordings that coefficients must not be fitted to, and coefficients that no server has: both are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blis_replay.base.errors import ReleaseError, ValidateError
from blis_replay.blis.latency.datasheets import bundled_gpus, gpu_named
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.ingest.checks import prefix_cache
from blis_replay.ingest.recording import BY_CLIENT, FIRST_TOKEN, ONE_TABLE, STAMPS, WAY, Recording
from blis_replay.validate.fit.evidence import is_load_level, known_architecture
from blis_replay.validate.metrics.observed import overloaded

Data = Literal["steps", "latencies"]
DataChoice = Literal["auto", "steps", "latencies"]
DATA_WORDS = {"auto": "steps or latencies", "steps": "steps", "latencies": "latencies"}

# us, pre-queue delay that is marked, and one that is refused.  Between sending and queueing a request is parsed and
# tokenised, which takes some 10 ms in our recordings.
_LONG_PRE_QUEUE_US = 100_000
_LONGEST_PRE_QUEUE_US = 1_000_000
# By how much a GPU may be faster than the fastest whose datasheet is known, whatever its data type.
_FASTER_GPUS = 10.0


def used_data(recordings: Sequence[Recording], data: DataChoice) -> tuple[tuple[Recording, Data], ...]:
    """The recordings with what is fitted to of each; raises ``ValidateError`` where that is nothing, or is refused."""
    for recording in recordings:
        remedy = "leave it out" if len(recordings) > 1 else "record this load again"
        if (why := why_not_fitted(recording, data, remedy)) is not None:
            raise ValidateError(why)
    used = tuple((recording, kind) for recording in recordings for kind in _kinds(recording, data))
    if not used:
        names = ", ".join(recording.alias for recording in recordings)
        raise ValidateError(
            f"{names}: no {DATA_WORDS[data]} to fit; ingest step records or per-request latencies of "
            f"{recordings[0].model}"
        )
    return used


def _kinds(recording: Recording, data: DataChoice) -> list[Data]:
    kinds: list[Data] = ["steps"] if data != "latencies" and recording.steps.height > 1 else []
    timed = not recording.requests.select("ttft_us", "e2e_us").drop_nulls().is_empty()
    return kinds + (["latencies"] if data != "steps" and (timed or is_load_level(recording)) else [])


def why_not_fitted(recording: Recording, data: DataChoice, remedy: str = "") -> str | None:
    """Why coefficients must not be fitted to a recording, and what to do: the ``remedy``, or fit to what else it has.

    None where they may.
    """
    if not is_load_level(recording) and recording.requests["prompt_tokens"].drop_nulls().is_empty():
        return (
            f"{recording.slug}: no request with a known prompt length, so prefills cannot be told from decodes; "
            "ingest its per-request records"
        )
    for kind in _kinds(recording, data):
        other: Data = "latencies" if kind == "steps" else "steps"
        is_usable = other in _kinds(recording, "auto") and _unusable(recording, other) is None
        if (why := _unusable(recording, kind)) is not None:
            says_what_to_do = BY_CLIENT in why or ONE_TABLE in why
            remedies = filter(
                None, ("" if says_what_to_do else remedy, f"fit with --from {other}" if is_usable else "")
            )
            return "; ".join(filter(None, (f"{recording.slug}: {why}", ", or ".join(remedies))))
    return None


def _unusable(recording: Recording, kind: Data) -> str | None:
    """Why the steps or the latencies of a recording say nothing of its step times; None where they do."""
    metrics = ("step_time", "") if kind == "steps" else ("e2e", "ttft", WAY, FIRST_TOKEN, STAMPS, "")
    for finding in recording.findings:
        if finding.severity == "unusable" and finding.metric in metrics:
            return f"{finding.metric or 'its data'} unusable ({finding.check}: {finding.message})"
        if kind == "latencies" and prefix_cache.MAY_BE_WARM in finding.measured:
            return f"a prefill may have been hits of the prefix cache ({finding.message})"
    is_queue = kind == "latencies" and overloaded(recording.findings)
    return "overloaded: its latencies measure how long the queue grew" if is_queue else None


@dataclass(frozen=True)
class Implausible:
    """A fitted coefficient beyond what any server has (``refused``), or beyond what one should have, in us."""

    coefficient: str
    value_us: float
    bound_us: float
    beyond_us: float
    refused: bool

    def __str__(self) -> str:
        """In words, with the likely reason."""
        return _IMPLAUSIBLE[self.coefficient].format(**vars(self))


_IMPLAUSIBLE = {
    "pre_queue": (
        "a pre-queue delay of {value_us:,.0f} us (at least {bound_us:,.0f}) is a queue, or the first event is not the "
        "first token (a reasoning model, a buffering proxy); tokenising takes less than {beyond_us:,.0f} us"
    ),
    "per_prefill_token": (
        "{value_us:.3g} us per prompt token (at most {bound_us:.3g}) is less than its arithmetic takes on any such GPU "
        "({beyond_us:.3g} us); the prefix cache was probably warm: ingest cached tokens per request, or record with "
        "new prompts"
    ),
    "intercept": (
        "an empty step of {value_us:,.0f} us (at most {bound_us:,.0f}) is shorter than reading the weights takes on "
        "any such GPU ({beyond_us:,.0f} us); check the model, its data type and tensor parallelism"
    ),
}


def implausible(record: FitRecord, recordings: Sequence[Recording]) -> list[Implausible]:
    """The fitted coefficients of a record that no server has, and those that one should not have."""
    fitted = {fit.name: fit for fit in record.coefficients if fit.status == "fitted"}
    found = []
    if (delay := fitted.get("pre_queue")) is not None and delay.low_us > _LONG_PRE_QUEUE_US:
        refused = delay.low_us > _LONGEST_PRE_QUEUE_US
        most_us = _LONGEST_PRE_QUEUE_US if refused else _LONG_PRE_QUEUE_US
        found.append(Implausible("pre_queue", delay.value_us, delay.low_us, most_us, refused))
    least_us = [_least_us(recording) for recording in recordings]
    for place, name in enumerate(("per_prefill_token", "intercept")):
        beyond_us = max((of[place] for of in least_us), default=0.0)
        if (fit := fitted.get(name)) is not None and fit.high_us < beyond_us:
            found.append(Implausible(name, fit.value_us, fit.high_us, beyond_us, refused=True))
    return found


def refuse_impossible(record: FitRecord, recordings: Sequence[Recording]) -> tuple[str, ...]:
    """Raise ``ValidateError`` for coefficients that no server has; in words those that one should not have."""
    found = implausible(record, recordings)
    names = ", ".join(recording.alias for recording in recordings)
    if refused := [one for one in found if one.refused]:
        raise ValidateError(f"{names}: no release: {'; '.join(map(str, refused))}")
    return tuple(f"{names}: {one}" for one in found)


def _least_us(recording: Recording) -> tuple[float, float]:
    """us of the arithmetic of a prompt token, and of reading the weights once, at the peak of the GPUs.

    0 for a model that is not known.  A GPU that is not known is taken for one that is faster than all known ones.
    """
    if (architecture := known_architecture(recording)) is None:
        return 0.0, 0.0
    setting, width = recording.engine.get("tensor_parallel_size"), architecture.bytes_per_parameter
    gpus = recording.tensor_parallelism or (1 if setting is None else int(setting.value))
    try:
        gpu = gpu_named(recording.hardware)
        # Numbers may be narrower than published, read and computed faster: the type may not be recorded.
        times = 2 if recording.served_dtype is None or "8" in recording.served_dtype else 1
        flops_per_s, bytes_per_s = times * gpu.flops_at(width), times * gpu.memory_bytes_per_s
    except ReleaseError:
        known = bundled_gpus().values()
        flops_per_s = _FASTER_GPUS * max(gpu.flops_at(width) for gpu in known)
        bytes_per_s = _FASTER_GPUS * max(gpu.memory_bytes_per_s for gpu in known)
    weights = architecture.always_read_parameters * width
    return 1e6 * architecture.layer_flops_per_token / gpus / flops_per_s, 1e6 * weights / gpus / bytes_per_s
