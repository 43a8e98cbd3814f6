"""The engine arguments of a recording, each with the source it came from.

Precedence: ``--engine FILE``, then what the recording says, then the bundled profile of
the slug, then vLLM's defaults (0.15: block size 16, prefix caching and chunked prefill on,
FCFS, 2,048 tokens and 256 sequences for the API server or 8,192 and 1,024 on GPUs of at
least 70 GiB other than the A100).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.documents import quoted, text, tokens, whole, yaml_mapping
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.log import ServerLog
from blis_replay.ingest.recording import Setting
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.steps.records import detected_async

_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "tensor_parallel_size",
    "long_prefill_token_threshold",
    "num_cpu_blocks",
    "cpu_fetch_us_per_block",
)
# Of these 0 switches something off.
_MAY_BE_ZERO = ("long_prefill_token_threshold", "num_cpu_blocks", "cpu_fetch_us_per_block")
_SWITCHES = ("async_scheduling", "enable_prefix_caching", "enable_chunked_prefill")
_WORDS = ("vllm_version", "scheduling_policy", "dtype")
ARGUMENTS = (*_COUNTS, *_SWITCHES, *_WORDS)

# GPUs of at least 70 GiB for which vLLM takes the larger defaults.
_LARGE_GPUS = re.compile(r"\b(H100|H200|H20|H800|GH200|B100|B200|GB200|B300|MI300X?|MI325X?|MI355X?)\b", re.IGNORECASE)
_ASYNC_BY_DEFAULT_FROM = (0, 15)

# vLLM's other names of a data type; "auto" is whatever the model's own files say.
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": None}

Source = tuple[str, str, Mapping[str, object]]  # source, detail, arguments


def read_engine_file(file: RecordedFile) -> dict[str, object]:
    """The arguments of an ``--engine FILE``: a YAML mapping of vLLM's argument names.

    Raises :class:`RecordingError` for an unknown argument or a value of the wrong type.
    """
    given = {key.replace("-", "_"): value for key, value in yaml_mapping(file).items()}
    return _checked(file.path, given)


def profile_arguments(profile: Mapping[str, object] | None) -> dict[str, object]:
    """The ``engine`` mapping of a bundled profile; the same errors as :func:`read_engine_file`."""
    given = (profile or {}).get("engine") or {}
    if not isinstance(given, Mapping):
        raise RecordingError("profile", "field engine", "no mapping of engine arguments", "mend the profile")
    arguments = {str(key).replace("-", "_"): value for key, value in given.items()}
    if version := text((profile or {}).get("vllm_version")):
        arguments.setdefault("vllm_version", version)
    return _checked(Path("profile"), arguments)


def engine_settings(sources: Iterable[Source], hardware: str | None) -> tuple[dict[str, Setting], tuple[str, ...]]:
    """One :class:`Setting` an argument, from the first source that has it, then the defaults.

    Also returns, in words, recorded values that were not usable or contradict the one taken.
    ``num_gpu_blocks`` and ``max_model_len`` have no default: they are absent if nobody says them.
    """
    settings: dict[str, Setting] = {}
    remarks: list[str] = []
    for source, detail, arguments in sources:
        for name, raw in arguments.items():
            value = _value(name, raw)
            taken = settings.get(name)
            if value is None:
                remarks.append(f"{name} in {detail} is not usable ({quoted(raw)})")
            elif taken is None:
                settings[name] = Setting(value, source, detail)
            elif taken.value != value and taken.source == source == "recorded":
                remarks.append(f"{name} is {taken.value} in {taken.detail} (used) and {value} in {detail}")
    for name, setting in _defaults(settings, hardware).items():
        settings.setdefault(name, setting)
    return {name: settings[name] for name in ARGUMENTS if name in settings}, tuple(remarks)


def _checked(path: Path, given: Mapping[str, object]) -> dict[str, object]:
    for name, raw in given.items():
        if name not in ARGUMENTS:
            raise RecordingError(
                path, f"field {name[:60]}", "no engine argument that is used here", f"known: {', '.join(ARGUMENTS)}"
            )
        if _value(name, raw) is None:
            wanted = (
                "a positive whole number" if name in _COUNTS else "true or false" if name in _SWITCHES else "a text"
            )
            raise RecordingError(path, f"field {name}", f"{quoted(raw)} is not usable", f"give {wanted}")
    return dict(given)


def _value(name: str, raw: object) -> int | bool | str | None:
    if name in _SWITCHES:
        return raw if isinstance(raw, bool) else None
    if name == "dtype":
        return _dtype(raw)
    if name in _WORDS:
        return text(str(raw)) if isinstance(raw, str | float) else None
    if name in _MAY_BE_ZERO:
        return whole(raw)
    return tokens(raw)


def _dtype(raw: object) -> str | None:
    """The data type served as vLLM names it: a quantization (``fp8``), else the type of the weights."""
    said = (text(raw) or "auto").lower().removeprefix("torch.")
    return _DTYPES.get(said, said)


def _defaults(settings: Mapping[str, Setting], hardware: str | None) -> dict[str, Setting]:
    large = hardware is not None and _LARGE_GPUS.search(hardware) is not None
    size = f"API server on {hardware or 'an unknown GPU'}"
    plain = "vLLM's default"
    return {
        "block_size": Setting(16, "default", plain),
        "max_num_seqs": Setting(1024 if large else 256, "default", f"{plain} for the {size}"),
        "max_num_batched_tokens": Setting(8192 if large else 2048, "default", f"{plain} for the {size}"),
        "enable_prefix_caching": Setting(True, "default", plain),
        "enable_chunked_prefill": Setting(True, "default", plain),
        "scheduling_policy": Setting("fcfs", "default", plain),
        "long_prefill_token_threshold": Setting(0, "default", plain),
        "async_scheduling": _default_async(settings.get("vllm_version")),
    }


def _default_async(version: Setting | None) -> Setting:
    if version is None:
        return Setting(False, "default", "the vLLM version is not known, so asynchronous scheduling is not assumed")
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})", str(version.value))
    recent = match is not None and (int(match[1]), int(match[2])) >= _ASYNC_BY_DEFAULT_FROM
    words = "on by default from 0.15" if recent else "off by default before 0.15"
    return Setting(recent, "default", f"vLLM {version.value}: {words}")


@dataclass(frozen=True)
class EngineEvidence:
    """What tells of the engine's arguments.

    ``configured``: by the experiment's configuration; ``header``: by that of its trace;
    ``steps``, ``journey_events``: what the server did (``STEP_SCHEMA``, ``JOURNEY_EVENT_SCHEMA``).
    """

    configured: Mapping[str, object]
    log: ServerLog
    header: Mapping[str, object]
    profile: Mapping[str, object]
    hardware: str | None
    steps: Rows
    journey_events: Rows


def engine_of(said: EngineEvidence, engine_file: Path | None) -> tuple[dict[str, Setting], tuple[str, ...]]:
    """Engine arguments by name, and in words where two sources disagree or one is not usable.

    ``engine_file``: YAML that overrules all others; :class:`RecordingError` if it cannot be read.
    """
    override = read_engine_file(RecordedFile(engine_file, engine_file.name)) if engine_file else {}
    log = said.log
    logged = {key: value for key, value in log.engine.items() if key != "num_gpu_blocks"}
    if log.version:
        logged["vllm_version"] = log.version
    sources: list[Source] = [
        ("file", engine_file.name if engine_file else "", override),
        ("recorded", "exp-config.yaml", said.configured),
        ("recorded", "server log", logged),
        ("recorded", "trace header", said.header),
        ("profile", "bundled profile", profile_arguments(said.profile)),
    ]
    block_size = int(engine_settings(sources, said.hardware)[0]["block_size"].value)
    sources[3:3] = _of_the_run(said, block_size)
    return engine_settings(sources, said.hardware)


_BLOCK_TOTALS = """
SELECT kv_blocks_total FROM steps WHERE kv_blocks_total IS NOT NULL
GROUP BY kv_blocks_total ORDER BY count(*) DESC, kv_blocks_total LIMIT 1
"""


def _of_the_run(said: EngineEvidence, block_size: int) -> list[Source]:
    """What nobody configured, and the run shows."""
    sources: list[Source] = []
    asynchronous = detected_async(said.steps, said.journey_events)
    if asynchronous is not None:
        detail = "journeys (whether outputs are processed after the next step began)"
        sources.append(("recorded", detail, {"async_scheduling": asynchronous}))
    totals = query(_BLOCK_TOTALS, {"kv_blocks_total": pl.Int64}, steps=said.steps).frame()
    if totals.height:
        # The pool without its reserved block, so vLLM's own count is one more.
        blocks = int(totals.item(0, 0)) + 1
        sources.append(("recorded", "step records (kv.blocks_total_gpu + 1)", {"num_gpu_blocks": blocks}))
    if logged := said.log.num_gpu_blocks(block_size):
        sources.append(("recorded", "server log", {"num_gpu_blocks": logged}))
    return sources
