"""Parts of pages that are made of the code, so that they cannot fall behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import click
from docs_pages import NAVIGATION, page_of
from docs_rooms import rooms_table

from blis_replay.ingest.checks.registry import CHECKS
from blis_replay.replay.mode import ALLOWED, ReplayMode
from blis_replay.validate import metrics, notebook
from blis_replay.validate.cli.main import cli


def checks() -> list[str]:
    """A section an instrument check: what it measures, and its thresholds with the reason."""
    rows = [f"| [`{check.name}`](#{check.name}) | {_cell(check.measures)} |" for check in CHECKS]
    sections = [
        line
        for check in CHECKS
        for line in ("", f"### {check.name}", "", f"Measures {check.measures}.", "", f"Threshold: {check.rule}.")
    ]
    return ["| check | measures |", "|---|---|", *rows, *sections]


def metric_definitions() -> list[str]:
    """The definitions of `validate/metrics.py`, as its docstring has them."""
    return ["```text", *_paragraph(metrics.__doc__ or ""), "```"]


def replay_modes() -> list[str]:
    """What a replay can substitute: a row a key of `--replay`, its default first."""
    default = ReplayMode()
    rows = [f"| `{key}` | `{getattr(default, key)}` | {_others(key, default)} |" for key in ALLOWED]
    return ["| key | default | can be replaced by |", "|---|---|---|", *rows]


def _others(key: str, default: ReplayMode) -> str:
    return ", ".join(f"`{value}`" for value in ALLOWED[key] if value != str(getattr(default, key)))


def commands() -> list[str]:
    """The help of every verb."""
    settings = cli.context_settings
    top = click.Context(cli, info_name="blis-replay", max_content_width=80, terminal_width=80, **settings)
    return [line for verb in _verbs(cli, top) for line in _help_of(verb)]


def notebook_functions() -> list[str]:
    """The public functions of `validate/notebook.py`, with the first sentence of each."""
    functions = [f for f in vars(notebook).values() if inspect.isfunction(f) and f.__module__ == notebook.__name__]
    shown = [(f.__name__, _first_line(f)) for f in functions if not f.__name__.startswith("_")]
    return ["| function | returns |", "|---|---|", *(f"| `br.{name}` | {_cell(line)} |" for name, line in shown)]


def contents() -> list[str]:
    """Every page of the documentation, under its section."""
    return [
        f"- {section}: " + ", ".join(f"[{page_of(name).title}]({name})" for name in names if name != "README.md")
        for section, names in NAVIGATION.items()
    ]


def _verbs(group: click.Group, context: click.Context) -> Iterator[click.Context]:
    """A context a verb, under its group's, as on the command line: what a group settles for its verbs holds."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None:
            continue
        verb = click.Context(command, info_name=name, parent=context)
        yield verb
        if isinstance(command, click.Group):
            yield from _verbs(command, verb)


def _help_of(verb: click.Context) -> list[str]:
    with verb:
        text = verb.get_help()
    return ["", f"## {verb.command_path}", "", "```text", *(line.rstrip() for line in text.splitlines()), "```"]


def _paragraph(text: str) -> list[str]:
    """The lines of a docstring's table, without its first sentence."""
    return text.strip().split("\n\n", 1)[1].splitlines()


def _first_line(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0].replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


GENERATED: dict[str, Callable[[], list[str]]] = {
    "checks": checks,
    "metrics": metric_definitions,
    "replay-modes": replay_modes,
    "commands": commands,
    "notebook": notebook_functions,
    "contents": contents,
    "rooms": rooms_table,
}
