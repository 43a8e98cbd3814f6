"""Whether the commands of ours that a page names, but does not run, have the options that it gives them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
from docs_fences import Part

from blis_replay.validate.cli.main import cli

_IN_TEXT = re.compile(r"`(blis-replay [^`]+)`")


def refuse_unknown_options(part: Part) -> None:
    """Raise ``ValueError`` for a verb or an option that does not exist."""
    for line in _named(part):
        for problem in _problems(line):
            raise ValueError(f"line {part.line} and on: `{line}`: {problem}")


def _named(part: Part) -> Iterator[str]:
    text = "\n".join(part.body).replace("\\\n", " ")
    if part.kind == "prose":
        yield from (" ".join(found.split()) for found in _IN_TEXT.findall(text))
    else:
        yield from (line for line in text.splitlines() if line.startswith("blis-replay "))


def _problems(line: str) -> Iterator[str]:
    words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        verb = words.pop(0)
        command = _get(command, verb)
        if command is None and verb != "VERB":
            yield f"there is no {verb}"
    if command is not None:
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        yield from (
            f"there is no {word}" for word in words if word.startswith("--") and word.split("=")[0] not in known
        )


def _get(group: click.Group, name: str) -> click.Command | None:
    return group.get_command(click.Context(group), name)
