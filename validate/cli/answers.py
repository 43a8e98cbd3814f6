"""How a verb's answer is printed: in which form, to which file, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from blis_replay.base.errors import BAD_DATA, FAULT, INTERRUPTED, WRONG_USE, printable

if TYPE_CHECKING:
    from blis_replay.validate.text.answer import Answer

Command = TypeVar("Command", bound=Callable[..., Any])
# Where a command keeps how its answer is to be printed.
_META = "blis_replay"
# The form of an answer by the ending of its file, where no form was asked for.
_FORMS = {".json": "json", ".csv": "csv", ".md": "markdown"}
# Whoever names such a file expects more than text in it.
_OTHER_KINDS = {".xlsx", ".xls", ".ods", ".pdf", ".parquet", ".png", ".svg", ".html", ".htm"}


def form_options() -> list[click.Option]:
    """What every verb has that answers: ``--json``, ``--csv``, ``--markdown``, ``-v`` and ``-q``."""
    flags = [([f"--{form}"], _form) for form in ("json", "csv", "markdown")]
    flags += [([f"--{name}", f"-{name[0]}"], _remember) for name in ("verbose", "quiet")]
    return [click.Option(names, is_flag=True, expose_value=False, callback=keep) for names, keep in flags]


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[f"{_META}.{param.name}"] = value


def _form(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Keep the one form that was asked for."""
    place = f"{_META}.form"
    asked = ctx.meta.get(place)
    if value and asked:
        raise click.UsageError(f"--{asked} and --{param.name}: one form at a time; leave one of them out")
    ctx.meta[place] = param.name if value else asked


def set_out_file(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    """Where the answer is written; None: standard output."""
    if value is not None and value.suffix.lower() in _OTHER_KINDS:
        named = "name a .json, .csv, .md or .txt file"
        raise click.UsageError(f"--out {value}: no answer is written as {value.suffix}; {named}")
    ctx.meta[f"{_META}.out"] = value


def quiet() -> bool:
    """Whether nothing but errors is to be printed."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(f"{_META}.quiet"))


def has_out_file() -> bool:
    """Whether the answer goes to a file."""
    return click.get_current_context().meta.get(f"{_META}.out") is not None


def asked_form() -> str | None:
    """The form that an option asked for; None for text."""
    form: str | None = click.get_current_context().meta.get(f"{_META}.form")
    return form


def verb_name(ctx: click.Context) -> str:
    """The verb with its own one, as ``coefficients-list``."""
    return "-".join(ctx.command_path.split()[1:]) or "program"


def with_schema(verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """A document that names its schema (``docs/schema.json``) and the version of this program."""
    from importlib.metadata import version

    return {"schema": f"blis-replay/{verb}/1", "version": version("blis-replay"), **document}


def error_json(code: int, text: str) -> str:
    """The JSON error that replaces an answer on standard output."""
    from blis_replay.validate.text.answer import page_json

    return page_json(with_schema("error", {"error": {"exit_code": code, "kind": _KINDS[code], "message": text}}))


_KINDS = {WRONG_USE: "wrong use", BAD_DATA: "bad data", FAULT: "fault", INTERRUPTED: "interrupted"}


def print_answer(answer: Answer, schema: str = "") -> int:
    """Print an answer as text, or in the form asked for, to where it is wanted; its exit code.

    ``schema``: of the JSON, where it is not the one that is named like the verb.
    """
    from blis_replay.validate.text.answer import csv, markdown, page_json, page_text

    meta = click.get_current_context().meta
    file: Path | None = meta.get(f"{_META}.out")
    form = asked_form() or (file and _FORMS.get(file.suffix))
    verbose = meta.get(f"{_META}.verbose")
    if answer.whole and (form or verbose):
        answer = answer.whole()
    if form is None:
        brief = answer.brief and not verbose
        text = page_text(answer.brief if brief else answer.page) + "\n"
    elif form == "json":
        text = page_json(with_schema(schema or verb_name(click.get_current_context()), answer.document)) + "\n"
    else:
        for sentence in () if quiet() else answer.beside_data:
            click.echo(printable(sentence), err=True)
        text = csv(answer.table) if form == "csv" else markdown(answer.table) + "\n"
    if file is not None:
        from blis_replay.base.files import write_whole

        write_whole(file, click.unstyle(text))
    elif not quiet():
        click.echo(text, nl=False)
    return answer.exit_code
