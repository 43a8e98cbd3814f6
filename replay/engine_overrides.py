"""Engine arguments put in the place of recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.replay.errors import UnknownNameError

EngineValue = int | bool | str | None
# Argument and value, by the argument's name.
EngineOverrides = tuple[tuple[str, EngineValue], ...]

# Its annotations are text, as the module postpones them.
_KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(EngineConfig)}
ENGINE_ARGUMENTS = tuple(_KINDS)
_SWITCH = {"true": True, "false": False}


def parse_engine_value(name: str, text: str) -> EngineValue:
    """The value of an engine argument, written ``256``, ``true``, ``fcfs``, or ``none`` for KV memory without bound.

    Raises ``UnknownNameError`` for an argument that the engine does not have, or a value of another
    kind; whether the engine can run with it is seen when it is made.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise UnknownNameError(f"{name!r} is no engine argument; use {', '.join(ENGINE_ARGUMENTS)}")
    if kind == "bool":
        if text.lower() not in _SWITCH:
            raise UnknownNameError(f"{name}={text} is not possible; use {name}=true|false")
        return _SWITCH[text.lower()]
    if kind.startswith("Literal"):
        return text
    if text.lower() == "none" and "None" in kind:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        or_none = ", or none" if "None" in kind else ""
        raise UnknownNameError(f"{name}={text} is not possible; give a whole number{or_none}")
    return int(text)


def parse_overrides(texts: Mapping[str, str]) -> EngineOverrides:
    """Overrides from values as text, sorted by argument; raises as ``parse_engine_value``."""
    return tuple(sorted((name, parse_engine_value(name, text)) for name, text in texts.items()))


def override_text(name: str, value: EngineValue) -> str:
    """``name=value`` as ``parse_engine_value`` reads it."""
    return f"{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"


def with_engine(recording: Recording, arguments: Mapping[str, EngineValue], source: str) -> Recording:
    """The recording as of an engine with these arguments; ``source`` is that of their settings."""
    engine = {name: setting for name, setting in recording.engine.items() if name not in arguments}
    engine |= {name: Setting(value, source) for name, value in arguments.items() if value is not None}
    return replace(recording, engine=engine)
