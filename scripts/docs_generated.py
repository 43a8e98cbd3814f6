"""What pages take from the code, so that they cannot fall behind it.

Generated regions, the rooms as a table, and the options of commands that a page
names but does not run.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path

import click
from docs_pages import NAVIGATION, ROOT, Part, cell, page_of

from blis_replay.ingest.checks.registry import CHECKS
from blis_replay.replay.mode import ALLOWED, ReplayMode
from blis_replay.validate import api
from blis_replay.validate.cli.main import cli
from blis_replay.validate.metrics import latency as metrics


def checks() -> list[str]:
    """One row per instrument check: what it measures, and its thresholds with the reason."""
    rows = [f"| `{check.name}` | {cell(check.measures)} | {cell(check.rule)} |" for check in CHECKS]
    return ["| check | measures | thresholds |", "|---|---|---|", *rows]


def metric_definitions() -> list[str]:
    """The definitions of `validate/metrics/latency.py`, as its docstring has them."""
    return ["```text", *(metrics.__doc__ or "").strip().split("\n\n", 1)[1].splitlines(), "```"]


def replay_modes() -> list[str]:
    """What a replay can substitute: one row per key of `--replay`, its default first."""
    default = ReplayMode()
    rows = ["| key | default | can be replaced by |", "|---|---|---|"]
    for key, values in ALLOWED.items():
        usual = str(getattr(default, key))
        rows.append(f"| `{key}` | `{usual}` | {', '.join(f'`{value}`' for value in values if value != usual)} |")
    return rows


def commands() -> list[str]:
    """Options before every verb and common ones, as the help of the program has them, and the help of every verb."""
    settings = cli.context_settings
    top = click.Context(cli, info_name="blis-replay", max_content_width=80, terminal_width=80, **settings)
    options = [part for part in top.get_help().split("\n\n") if part.startswith(("Options:", "Common options"))]
    common = "\n\n".join(options).splitlines()
    return ["", "```text", *common, "```", *(line for verb in verbs(cli, top) for line in _help_of(verb))]


def public_functions() -> list[str]:
    """The functions of `blis_replay.validate.api`: each with its first sentence and its example."""
    rows = [
        f"| `br.{name}` | {cell(_first_line(function))} | `{cell(example_of(function))}` |"
        for name, function in sorted(public_api().items())
    ]
    return ["| function | returns | example |", "|---|---|---|", *rows]


def public_api() -> dict[str, Callable[..., object]]:
    """The functions of `blis_replay.validate.api` by name."""
    named = vars(api).items()
    return {n: f for n, f in named if isfunction(f) and f.__module__ == api.__name__ and not n.startswith("_")}


def example_of(function: Callable[..., object]) -> str:
    """The expression in the docstring of a public function that shows its use."""
    found = re.search(r"Example: ``(.+)``", function.__doc__ or "")
    return found[1] if found else ""


def contents() -> list[str]:
    """Every page of the documentation, under its section."""
    return [
        f"- {section}: " + " · ".join(f"[{page_of(name).title}]({name})" for name in names)
        for section, names in NAVIGATION.items()
    ]


def verbs(group: click.Group, context: click.Context) -> Iterator[click.Context]:
    """One context per verb, under its group's, as on the command line: what a group settles for its verbs holds."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None:
            continue
        verb = click.Context(command, info_name=name, parent=context)
        yield verb
        if isinstance(command, click.Group):
            yield from verbs(command, verb)


def _help_of(verb: click.Context) -> list[str]:
    """As ``--help`` prints it; of a verb of the labs without examples and options, which its ``--help`` has."""
    with verb:
        text = "\n".join(line.rstrip() for line in verb.get_help().splitlines())
    if (verb.command.callback or _help_of).__module__.startswith("blis_replay_labs"):
        text = "\n\n".join(text.split("\n\n")[:2])
    return ["", f"## {verb.command_path}", "", "```text", *text.splitlines(), "```"]


def _first_line(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0].replace("``", "`")


_ROOMS = ("validate", "replay", "fixtures", "ingest", "blis", "recorder", "base")


def rooms_table() -> list[str]:
    """A row per room and per folder in it: what it is for, and what it may import."""
    rows = [_row(folder) for room in _ROOMS for folder in [ROOT / room, *_folders(room)]]
    return ["| room | what it is for | may import |", "|---|---|---|", *rows]


def _row(folder: Path) -> str:
    purpose, *_, may_import = _docstring(folder)
    names = may_import.removeprefix("May import: ").removesuffix(".")
    return f"| `{folder.relative_to(ROOT).as_posix()}/` | {purpose} | {names} |"


def _docstring(folder: Path) -> list[str]:
    """The paragraphs of the folder's docstring, each in one line: what it is for first, what it may import last."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    return [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n")]


def _folders(room: str) -> list[Path]:
    """The folders of a room that have modules, those inside of others left out."""
    return sorted(path.parent for path in (ROOT / room).glob("*/__init__.py"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, without what they are made of: ``ast.walk`` takes ten times as long."""
    for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(node, inner, ()):
            yield one
            yield from statements(one)


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
        command = command.get_command(click.Context(command), verb)
        if command is None and verb != "VERB":
            yield f"there is no {verb}"
    if command is not None:
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        own = words[: words.index("--")] if "--" in words else words  # behind it stands a command of another program
        yield from (f"there is no {word}" for word in own if word.startswith("--") and word.split("=")[0] not in known)


GENERATED: dict[str, Callable[[], list[str]]] = {
    "checks": checks,
    "metrics": metric_definitions,
    "replay-modes": replay_modes,
    "commands": commands,
    "public-functions": public_functions,
    "contents": contents,
    "rooms": rooms_table,
}
