"""Each command that any message names exists, with the options that it is told with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import blis_replay.validate
from blis_replay.validate.cli.main import LABS, VERBS, cli

PACKAGES = Path(blis_replay.validate.__file__).parents[1]
ROOMS = ("validate", "replay", "ingest", "blis", "fixtures", "recorder")
# A name, or a word that is put in only when it is printed.
_FILLED_IN = "FILLED"
_COMMAND = re.compile(r"(?<![\w/-])blis-replay ((?:--?[a-z-]+ )*)([a-z]+)((?: [^;`,()]*)?)")


def texts(path: Path) -> Iterator[str]:
    """The texts of a module, docstrings of verbs among them, as they are printed but for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else _FILLED_IN for one in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def told() -> list[tuple[str, str, str]]:
    """Module, verb and the rest of each command."""
    found = []
    for room in ROOMS:
        for path in sorted((PACKAGES / room).rglob("*.py")):
            for text in texts(path):
                for _, verb, rest in _COMMAND.findall(text):
                    found.append((path.relative_to(PACKAGES).as_posix(), verb, rest.splitlines()[0] if rest else ""))
    return found


def command_of(verb: str, rest: str) -> tuple[click.Command | None, str]:
    """The command, of a group its member, and what follows it."""
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    while isinstance(command, click.Group):
        name, _, after = rest.strip().partition(" ")
        member = command.get_command(context, name)
        if member is None:
            break
        command, rest = member, after
    return command, rest


@pytest.mark.slow
def test_every_command_of_a_message_exists_with_its_options() -> None:
    commands = told()
    assert len({verb for _, verb, _ in commands} & {*VERBS, *LABS}) > 15, "the search finds commands"
    wrong = []
    for module, verb, rest in commands:
        command, rest = command_of(verb, rest)
        if command is None:
            # "blis-replay can read it" names no command; one with an option does.
            wrong += [f"{module}: blis-replay {verb}{rest}: no such verb"] if "--" in rest else []
            continue
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
            "--help"
        }
        # Behind " -- " stands the command of another program.
        options = re.findall(r"(?<=\s)--[a-z][a-z-]*", f" {rest}".partition(" -- ")[0])
        wrong += [f"{module}: blis-replay {verb}{rest}: {one}" for one in options if one not in known]
    assert wrong == []
