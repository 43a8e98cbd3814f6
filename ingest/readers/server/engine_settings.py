"""The engine arguments of a recording, each with the source it came from.

The first source that has an argument wins: ``--engine FILE``; the server's own log, resolved values before given
ones; what the run shows; configuration files; derived values; the bundled profile of the slug; vLLM's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import polars as pl

from blis_replay.base.engine_packs import choose_pack, known_release, release_numbers
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import quoted, text, yaml_mapping
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import ServerFacts
from blis_replay.ingest.readers.server.engine_arguments import ARGUMENTS, checked_arguments
from blis_replay.ingest.readers.server.engine_defaults import Machine, default_settings, gpu_gib_of
from blis_replay.ingest.readers.server.log import ServerLog
from blis_replay.ingest.recording import ENGINE_CHECK, Finding, Setting
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.steps.records import detected_async

_SYNCHRONOUS_DRAFTERS = ("ngram", "suffix", "medusa", "mlp_speculator")

Source = tuple[str, str, Mapping[str, object]]  # source, detail, arguments


@dataclass(frozen=True)
class GivenArguments:
    """Engine arguments that overrule what a recording says, and the name of the file that gave them."""

    arguments: Mapping[str, object]
    name: str


def given_arguments(path: Path) -> GivenArguments:
    """The arguments of an ``--engine FILE``; :class:`RecordingError` as :func:`read_engine_file`."""
    return GivenArguments(read_engine_file(RecordedFile(path, path.name)), path.name)


def read_engine_file(file: RecordedFile) -> dict[str, int | float | bool | str]:
    """The arguments of an ``--engine FILE``: a YAML mapping of vLLM's argument names, or a model's ``config.json``.

    Raises :class:`RecordingError` for an unknown argument or a value of the wrong type.
    """
    document = yaml_mapping(file)
    if "architectures" in document:
        from blis_replay.ingest.readers.server.layers import groups_of_model

        document = {"kv_cache_groups": groups_of_model(document)}
    return checked_arguments(file.path, document)


def profile_arguments(profile: Mapping[str, object] | None) -> Mapping[str, object]:
    """The ``engine`` mapping of a bundled profile; the same errors as :func:`read_engine_file`."""
    given = (profile or {}).get("engine") or {}
    if not isinstance(given, Mapping):
        problem = "not key: value pairs of engine arguments"
        raise RecordingError("profile", "field engine", problem, "correct the profile")
    arguments = {str(key): value for key, value in given.items()}
    if version := text((profile or {}).get("vllm_version")):
        arguments.setdefault("vllm_version", version)
    return checked_arguments(Path("profile"), arguments)


def merged(sources: Iterable[Source]) -> tuple[dict[str, Setting], tuple[Finding, ...]]:
    """One :class:`Setting` an argument, from the first source that has it.

    A finding each: recorded values that are not usable, and what two sources contradict each other in.
    """
    settings: dict[str, Setting] = {}
    findings: list[Finding] = []
    for source, detail, arguments in sources:
        for name, raw in arguments.items():
            value = ARGUMENTS[name].read(raw)
            taken = settings.get(name)
            if name == "dtype" and raw == "auto":  # whatever the model's own files say
                continue
            if value is None:
                findings.append(_finding(f"{name} in {detail} is not usable ({quoted(raw)})", argument=name))
            elif taken is None:
                settings[name] = Setting(value, source, detail)
            elif taken.value != value and source != "profile" and _comparable(name, value):
                message = f"{name} is {taken.value} in {taken.detail} (used) and {value} in {detail}"
                findings.append(_finding(message, argument=name, used=str(taken.value), also=str(value)))
    return settings, tuple(findings)


def _comparable(name: str, also: object) -> bool:
    """Whether two values exclude each other: a server started with ``auto`` resolves it."""
    return not (name in ("dtype", "kv_cache_dtype", "speculative_config", "kv_cache_groups") or also == "auto")


def engine_settings(sources: Iterable[Source], machine: Machine) -> tuple[dict[str, Setting], tuple[Finding, ...]]:
    """What the sources say, then the defaults of the machine, and the findings of :func:`merged`.

    ``num_gpu_blocks`` and ``max_model_len`` have no default: they are absent if nobody says them.
    """
    settings, findings = merged(sources)
    machine = _completed(machine, settings)
    for name, setting in default_settings(machine).items():
        settings.setdefault(name, _limited(name, setting, settings))
    return {name: settings[name] for name in ARGUMENTS if name in settings}, findings


def _completed(machine: Machine, settings: Mapping[str, Setting]) -> Machine:
    """The machine with what the arguments say of it."""
    version, device = settings.get("vllm_version"), settings.get("device")
    ranks = [settings.get(name) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    device_class = machine.device if device is None else "cpu" if device.value == "cpu" else "gpu"
    if version is not None and "+cpu" in str(version.value):
        device_class = "cpu"
    machine = replace(
        machine,
        version="" if version is None else str(version.value),
        release=None if version is None else known_release(version.value),
        device=device_class,
        ranks=prod(int(rank.value) for rank in ranks if rank is not None),
    )
    budget = settings.get("max_num_batched_tokens")
    resolved = budget is not None and budget.source == "recorded" and budget.detail == RESOLVED
    return machine.seen_from(int(budget.value)) if resolved and budget is not None else machine


def _limited(name: str, setting: Setting, settings: Mapping[str, Setting]) -> Setting:
    """A default within what other arguments leave room for (vllm/engine/arg_utils.py, after get_batch_defaults)."""
    said = {key: other.value for key, other in settings.items()}
    value, why = setting.value, ""
    if name == "async_scheduling" and value and (drafter := _drafter_without_async(said)):
        value, why = False, f", but off with drafts by {drafter}"
    if name in ("max_num_seqs", "max_num_batched_tokens") and said.get("performance_mode") == "throughput":
        value, why = 2 * int(value), ", twice with performance_mode throughput"
    longest = said.get("max_model_len")
    if name == "max_num_batched_tokens" and said.get("enable_chunked_prefill") is False and longest:
        value, why = max(int(value), int(longest)), why + ", at least max_model_len without chunked prefill"
    if name == "max_num_batched_tokens" and longest and "max_num_seqs" in said:
        most = int(said["max_num_seqs"]) * int(longest)
        value, why = (most, why + ", at most max_num_seqs * max_model_len") if most < int(value) else (value, why)
    if name == "max_num_seqs" and int(said.get("max_num_batched_tokens", value)) < int(value):
        value, why = said["max_num_batched_tokens"], why + ", at most max_num_batched_tokens"
    return replace(setting, value=value, detail=setting.detail + why)


def _drafter_without_async(said: Mapping[str, object]) -> str:
    """The drafter with which vLLM switches asynchronous scheduling off by itself (vllm/config/vllm.py); else empty."""
    words = str(said.get("speculative_config", "")).split()
    return next((name for name in _SYNCHRONOUS_DRAFTERS if f"method={name}" in words), "")


RESOLVED = "server log, as it runs"
GIVEN = "server log, as started"


@dataclass(frozen=True)
class EngineEvidence:
    """The sources of engine arguments.

    ``written``: what files say that were written down beside it.  ``steps`` (``STEP_SCHEMA``), ``journey_events``
    (``JOURNEY_EVENT_SCHEMA``): what the server did.  ``recorder``: the arguments of its scheduler.  ``metrics``: its
    cache, by ``/metrics``.
    """

    written: Sequence[ServerFacts]
    log: ServerLog
    profile: Mapping[str, object]
    hardware: str | None
    steps: Rows
    journey_events: Rows
    recorder: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)


def engine_of(said: EngineEvidence, given: GivenArguments | None) -> tuple[dict[str, Setting], tuple[Finding, ...]]:
    """Engine arguments by name; a finding each where two sources disagree, or one is not usable or doubtful.

    ``given``: arguments that overrule all others.
    """
    log = said.log
    version = {"vllm_version": log.version} if log.version else {}
    groups = {"kv_cache_groups": "several"} if log.hybrid else {}
    sources: list[Source] = [
        ("file", given.name if given else "", given.arguments if given else {}),
        ("recorded", "recorder", {name: value for name, value in said.recorder.items() if name in ARGUMENTS}),
        ("recorded", RESOLVED, version | groups | log.resolved),
        ("recorded", "/metrics", said.metrics),
        ("recorded", GIVEN, log.given),
        *_of_the_run(said),
        *(("recorded", facts.name, facts.engine) for facts in said.written),
    ]
    machine = _machine(said)
    profile: Source = ("profile", "bundled profile", profile_arguments(said.profile))
    known, _findings = engine_settings([*sources, profile], machine)
    derived, doubts = _derived_blocks(log, known)
    sources += [derived, profile]
    settings, findings = engine_settings(sources, machine)
    findings = (*findings, *_findings_of_log(log), *doubts)
    # Another release's scheduling may stand for one that was not compared itself.
    if said_version := settings.get("vllm_version"):
        choice = choose_pack(str(said_version.value))
        findings += (_finding(choice.remark, scheduled_as=choice.release),) if choice.remark else ()
    return settings, findings


def _machine(said: EngineEvidence) -> Machine:
    """The machine by the name of its hardware, serving requests unless the log says otherwise."""
    hardware, log = said.hardware, said.log
    named_cpu = any(word in (hardware or "").upper() for word in ("CPU", "XEON", "EPYC"))
    device = None if hardware is None else "cpu" if named_cpu else "gpu"
    return Machine(device=device, gpu_gib=gpu_gib_of(hardware), offline=bool(log.offline), listed=log.listed)


def _derived_blocks(log: ServerLog, known: Mapping[str, Setting]) -> tuple[Source, list[Finding]]:
    """KV blocks from the KV tokens of the log, and why not, or with what doubt."""
    if log.kv_tokens is None:
        return ("derived", "", {}), []
    block_size = int(known["block_size"].value)
    groups = known.get("kv_cache_groups")
    of_groups = None if groups is None else _blocks_of_groups(log, str(groups.value), known)
    if groups is not None and of_groups is not None:
        detail = f"{log.kv_tokens:,} tokens of KV cache in the server log, of {groups.value}"
        return ("derived", detail, {"num_gpu_blocks": of_groups}), []
    if log.hybrid:
        message = (
            f"KV blocks cannot be derived from the {log.kv_tokens:,} tokens of KV cache in the server log: the model "
            f"keeps several kinds of KV cache (the log has {log.hybrid!r}), so that they do not tell; up to vLLM 0.20 "
            "they are also 2 to 4 times too few (vllm-project/vllm#40384)"
        )
        return ("derived", "", {}), [_finding(message, argument="num_gpu_blocks", kv_tokens=log.kv_tokens)]
    blocks = log.num_gpu_blocks(block_size)
    detail = f"{log.kv_tokens:,} tokens of KV cache in the server log / block size {block_size}"
    return ("derived", detail, {} if blocks is None else {"num_gpu_blocks": blocks}), []


def _blocks_of_groups(log: ServerLog, groups: str, known: Mapping[str, Setting]) -> int | None:
    """KV blocks of a server whose layers keep several groups of them; None where that is not known."""
    from blis_replay.ingest.readers.server.layers import blocks_of_tokens

    longest, version = known.get("max_model_len"), known.get("vllm_version")
    if longest is None or version is None or log.kv_tokens is None or log.contradicts_itself or groups == "1":
        return None
    # Windows make room for the steps in flight from 0.26 on (VllmConfig.max_in_flight_tokens).
    steps = 2 if known["async_scheduling"].value and release_numbers(str(version.value)) >= (0, 26, 0) else 1
    in_flight = steps * int(known["max_num_batched_tokens"].value)
    return blocks_of_tokens(groups, log.kv_tokens, int(longest.value), int(known["block_size"].value), in_flight)


def _findings_of_log(log: ServerLog) -> Iterator[Finding]:
    """What of the line of arguments is not known."""
    if kept := [f"{name} {quoted(value)}" for name, value in log.as_text.items() if name in ARGUMENTS]:
        yield _finding(f"engine arguments in the server log that are kept as text: {', '.join(kept[:5])}")
    if log.cut:
        yield _finding("the line of engine arguments in the server log is cut off: what follows is not known")


def _finding(message: str, **measured: float | int | str | None) -> Finding:
    return Finding(ENGINE_CHECK, "note", "", message, measured)


_BLOCK_TOTALS = """
SELECT kv_blocks_total FROM steps WHERE kv_blocks_total IS NOT NULL
GROUP BY kv_blocks_total ORDER BY count(*) DESC, kv_blocks_total LIMIT 1
"""


def _of_the_run(said: EngineEvidence) -> list[Source]:
    """What nobody configured, and the run shows."""
    sources: list[Source] = []
    asynchronous = detected_async(said.steps, said.journey_events)
    if asynchronous is not None:
        detail = "journeys (whether outputs are processed after the next step began)"
        sources.append(("derived", detail, {"async_scheduling": asynchronous}))
    totals = query(_BLOCK_TOTALS, {"kv_blocks_total": pl.Int64}, steps=said.steps).frame()
    if totals.height:
        # The pool without its reserved block, so vLLM's own count is one more.
        blocks = int(totals.item(0, 0)) + 1
        sources.append(("derived", "step records (kv.blocks_total_gpu + 1)", {"num_gpu_blocks": blocks}))
    return sources
