"""How the experiment was set up: ``exp-config.yaml``, the load profile, inference-perf's resolved configuration.

The resolved configuration (``results/config.yaml``) says what was run.  The profile says what was asked for, and the
two can differ: builds before 0.4 ignored keys they did not know and ran their default 10 x 10 prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import ServerFacts
from blis_replay.ingest.readers.server.engine_arguments import checked_arguments
from blis_replay.ingest.recording import LoadProfile, SharedPrefix, Stage

# v0.4.0 of inference-perf renamed the first two.
_SHARED_PREFIX_KEYS: dict[str, tuple[str, ...]] = {
    "num_groups": ("num_groups", "num_unique_system_prompts"),
    "num_prompts_per_group": ("num_prompts_per_group", "num_users_per_system_prompt"),
    "system_prompt_tokens": ("system_prompt_len",),
    "question_tokens": ("question_len",),
    "output_tokens": ("output_len",),
}
# What is said of an experiment beside its engine arguments.
_EXPERIMENT_KEYS = ("model", "app", "hardware", "tensor_parallelism", "engine")


@dataclass(frozen=True)
class LoadConfig:
    """The load as configured in the file ``source``: stages, shared-prefix workload, whether EOS was ignored.

    ``arrivals``, ``stage_gap_us`` and ``multi_turn`` as in ``recording.LoadProfile``.  ``prefix_tokens``: what all
    prompts of GuideLLM's synthetic data begin with, and share nothing else; ``None`` if that is not said.
    """

    source: str = ""
    model: str | None = None
    stages: tuple[Stage, ...] = ()
    shared_prefix: SharedPrefix | None = None
    configured_output_tokens: int | None = None
    ignore_eos: bool | None = None
    arrivals: str | None = None
    stage_gap_us: int | None = None
    multi_turn: bool = False
    prefix_tokens: int | None = None


def read_experiment_config(file: RecordedFile) -> ServerFacts:
    """What ``exp-config.yaml`` says.

    Engine arguments stand at its top or under ``engine``; what is null is not said.  Raises :class:`RecordingError` if
    it is not a YAML mapping, for an unknown key and for an engine argument of the wrong type.  An unusable model or
    tensor parallelism is rejected and counted.
    """
    document = documents.yaml_mapping(file)
    engine = document.get("engine") or {}
    if not isinstance(engine, Mapping):
        problem = "not key: value pairs of engine arguments"
        raise RecordingError(file.path, "field engine", problem, "write `engine: {NAME: VALUE}`")
    above = {key: value for key, value in document.items() if key not in _EXPERIMENT_KEYS}
    said_twice = [str(key) for key in engine if key in above]
    if said_twice:
        raise RecordingError(file.path, f"field {said_twice[0]}", "given at the top and under engine", "give it once")
    arguments = {str(key): value for key, value in (above | dict(engine)).items() if value is not None}
    said = document.get("tensor_parallelism")
    model, tensor_parallelism = documents.text(document.get("model") or engine.get("model")), documents.tokens(said)
    if model is None and document.get("model") is not None:
        file.tally.reject("field model", f"{documents.quoted(document['model'])} is not a name")
    if tensor_parallelism is None and said is not None:
        file.tally.reject("field tensor_parallelism", f"{documents.quoted(said)} is not a positive whole number")
    return ServerFacts(
        model,
        tensor_parallelism,
        checked_arguments(file.path, arguments, _EXPERIMENT_KEYS),
        documents.text(document.get("hardware")),
        name="exp-config.yaml",
        app=documents.text(document.get("app")),
    )


def read_load_config(file: RecordedFile) -> LoadConfig:
    """A resolved inference-perf configuration or a profile.

    A profile of GuideLLM has no stages, and says what its prompts share.  Raises :class:`RecordingError` if the file is
    not a YAML mapping.  A stage without a usable rate and duration is rejected and counted.
    """
    document = documents.yaml_mapping(file)
    asked, load = documents.section(document, "data.shared_prefix"), documents.section(document, "load")
    return LoadConfig(
        source=file.name,
        model=documents.text(documents.section(document, "server").get("model_name")),
        stages=_stages(file, load.get("stages")),
        shared_prefix=_shared_prefix(asked),
        configured_output_tokens=documents.tokens(asked.get("output_len")),
        ignore_eos=documents.switch(documents.section(document, "server").get("ignore_eos")),
        arrivals=documents.text(load.get("type")),
        stage_gap_us=documents.microseconds(load.get("interval")),
        multi_turn=asked.get("enable_multi_turn_chat") is True,
        prefix_tokens=_synthetic_prefix(documents.section(document, "data")),
    )


def declared_load(profile: LoadConfig, resolved: LoadConfig) -> LoadProfile | None:
    """The load as the profile declares it, else the resolved configuration; None if neither declares one.

    The pause between stages is that of the resolved configuration where the profile leaves it to the default.
    """
    for config in (profile, resolved):
        if config.stages or config.shared_prefix:
            gap_us = resolved.stage_gap_us if config.stage_gap_us is None else config.stage_gap_us
            load = config.arrivals, config.stages, gap_us or 0, config.shared_prefix, config.multi_turn
            return LoadProfile(config.source, *load)
    return None


def _synthetic_prefix(data: Mapping[str, Any]) -> int | None:
    """Shared tokens of GuideLLM's synthetic prompts, drawn anew behind the prefix; None for several prefixes."""
    several = documents.tokens(data.get("prefix_count")) not in (None, 1) or data.get("prefix_buckets") is not None
    made = documents.tokens(data.get("prompt_tokens")) is not None and not several
    length = documents.whole(data.get("prefix_tokens")) if made else None
    return length if length is not None and length < documents.MAX_TOKENS else None


def _shared_prefix(asked: Mapping[str, Any]) -> SharedPrefix | None:
    values = {name: documents.tokens(documents.at(asked, *keys)) for name, keys in _SHARED_PREFIX_KEYS.items()}
    known = {name: value for name, value in values.items() if value is not None}
    return SharedPrefix(**known) if len(known) == len(values) else None


def _stages(file: RecordedFile, listed: object) -> tuple[Stage, ...]:
    stages = []
    for index, entry in enumerate(listed if isinstance(listed, list) else []):
        rate, duration_us = (
            documents.finite(documents.at(entry, "rate")),
            documents.microseconds(documents.at(entry, "duration")),
        )
        if rate is None or duration_us is None or rate <= 0 or duration_us <= 0:
            file.tally.reject(f"load.stages[{index}]", "expected a positive rate and duration")
            continue
        stages.append(Stage(index, rate, duration_us))
    return tuple(stages)
