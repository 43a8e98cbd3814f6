"""The engine arguments of a recording: all that is said of them, joined in the order of trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.engine_settings import (
    Source,
    engine_settings,
    profile_arguments,
    read_engine_file,
)
from blis_replay.ingest.readers.server.server_log import ServerLog
from blis_replay.ingest.recording import Setting
from blis_replay.ingest.row_parts import RowParts
from blis_replay.ingest.scheduling_mode import detected_async


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
    steps: RowParts
    journey_events: RowParts


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


def _of_the_run(said: EngineEvidence, block_size: int) -> list[Source]:
    """What nobody configured, and the run shows."""
    sources: list[Source] = []
    asynchronous = detected_async(said.steps, said.journey_events)
    if asynchronous is not None:
        detail = "journeys (whether outputs are processed after the next step began)"
        sources.append(("recorded", detail, {"async_scheduling": asynchronous}))
    totals = Counter[int]()
    for part in said.steps.frames(["kv_blocks_total"]):
        totals.update(dict(part.drop_nulls()["kv_blocks_total"].value_counts().iter_rows()))
    if totals:
        # The pool without its reserved block, so vLLM's own count is one more.
        blocks = min(totals, key=lambda total: (-totals[total], total)) + 1
        sources.append(("recorded", "step records (kv.blocks_total_gpu + 1)", {"num_gpu_blocks": blocks}))
    if logged := said.log.num_gpu_blocks(block_size):
        sources.append(("recorded", "server log", {"num_gpu_blocks": logged}))
    return sources
