"""What no coefficients may be fitted to, and coefficients that no server has: both are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from blis_replay.base.errors import ReleaseError, ValidateError
from blis_replay.blis.latency.datasheets import bundled_gpus, gpu_named
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.ingest.recording import FIRST_TOKEN, WAY, Recording
from blis_replay.validate.fit.evidence import is_load_level, known_architecture
from blis_replay.validate.metrics.observed import overloaded

Data = Literal["steps", "latencies"]
DataChoice = Literal["auto", "steps", "latencies"]
DATA_WORDS = {"auto": "steps or latencies", "steps": "steps", "latencies": "latencies"}

# Between sending and queueing a request is parsed and tokenised, which takes some 10 ms in our recordings.
_LONGEST_PRE_QUEUE_US = 1_000_000
# By how much a GPU may be faster than the fastest whose datasheet is known, whatever its data type.
_FASTER_GPUS = 10.0


def used_data(recordings: Sequence[Recording], data: DataChoice) -> tuple[tuple[Recording, Data], ...]:
    """The recordings with what is fitted to of each; raises ``ValidateError`` where that is nothing, or is refused."""
    for recording in recordings:
        if (why := why_not_fitted(recording, data)) is not None:
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


def why_not_fitted(recording: Recording, data: DataChoice) -> str | None:
    """Why coefficients must not be fitted to a recording, and what to do; None where they may."""
    if not is_load_level(recording) and recording.requests["prompt_tokens"].drop_nulls().is_empty():
        return (
            f"{recording.slug}: no request with a known prompt length, so prefills cannot be told from decodes; "
            "ingest its per-request records"
        )
    for kind in _kinds(recording, data):
        other: Data = "latencies" if kind == "steps" else "steps"
        is_usable = other in _kinds(recording, "auto") and _unusable(recording, other) is None
        instead = f", or fit with --from {other}" if is_usable else ""
        if (why := _unusable(recording, kind)) is not None:
            return f"{recording.slug}: {why}; leave it out{instead}"
    return None


def _unusable(recording: Recording, kind: Data) -> str | None:
    """Why the steps or the latencies of a recording say nothing of its step times; None where they do."""
    metrics = ("step_time", "") if kind == "steps" else ("e2e", "ttft", WAY, FIRST_TOKEN, "")
    for finding in recording.findings:
        if finding.severity == "unusable" and finding.metric in metrics:
            return f"{finding.metric or 'its data'} unusable ({finding.check}: {finding.message})"
    is_queue = kind == "latencies" and overloaded(recording.findings)
    return "overloaded: its latencies measure how long the queue grew" if is_queue else None


def refuse_impossible(record: FitRecord, recordings: Sequence[Recording]) -> None:
    """Raise ``ValidateError`` for fitted coefficients that no server has; the message names the likely reason."""
    fitted = {fit.name: fit for fit in record.coefficients if fit.status == "fitted"}
    delay, prompt = fitted.get("pre_queue"), fitted.get("per_prefill_token")
    names = ", ".join(recording.alias for recording in recordings)
    if delay is not None and delay.low_us > _LONGEST_PRE_QUEUE_US:
        raise ValidateError(
            f"{names}: no release: a pre-queue delay of {delay.value_us / 1e6:.1f} s is a queue, or the first event is "
            "not the first token (a reasoning model, a buffering proxy)"
        )
    least_us = max((_least_prompt_token_us(recording) for recording in recordings), default=0.0)
    if prompt is not None and prompt.high_us < least_us:
        raise ValidateError(
            f"{names}: no release: {prompt.value_us:.3g} us per prompt token (at most {prompt.high_us:.3g}) is less "
            f"than its arithmetic takes on any such GPU ({least_us:.3g} us); the prefix cache was probably warm: "
            "ingest cached tokens per request, or record with new prompts"
        )


def _least_prompt_token_us(recording: Recording) -> float:
    """us that the arithmetic of a prompt token takes at the peak of the GPUs; 0 for a model that is not known."""
    architecture = known_architecture(recording)
    if architecture is None:
        return 0.0
    setting = recording.engine.get("tensor_parallel_size")
    gpus = recording.tensor_parallelism or (1 if setting is None else int(setting.value))
    token_us = 1e6 * architecture.layer_flops_per_token / gpus
    width, dtype = architecture.bytes_per_parameter, recording.served_dtype
    try:
        flops_per_s = gpu_named(recording.hardware).flops_at(width)
    except ReleaseError:
        return token_us / (_FASTER_GPUS * max(gpu.flops_at(width) for gpu in bundled_gpus().values()))
    # Numbers of half the width are computed twice as fast; weights whose type is not recorded may be of 8 bits.
    return token_us / flops_per_s / (2 if dtype is None or "8" in dtype else 1)
