"""The shape of every verb: its options in sections, ``-o`` where it has none, and what its output does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from blis_replay.validate.cli.options import OUT_FILE, set_out_file

# What every verb has, in the order of its help; all else is the verb's own.
COMMON = (
    *("--executor", "--workers", "--store", "--format", "--json", "--csv", "--markdown"),
    *("--verbose", "--quiet", "--help"),
)


class Verb(click.Command):
    """A command whose help has the common options in a section of their own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        names = [name for param in self.params for name in param.opts]
        if "--format" in names and "--out" not in names:
            at = next(i for i, param in enumerate(self.params) if param.opts[0] in COMMON)
            self.params.insert(at, _answer_file())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verb's own options first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Common options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                common = {*param.opts, *param.secondary_opts} & set(COMMON)
                sections["Common options" if common else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class VerbGroup(click.Group):
    """A group of verbs."""

    command_class = Verb


def _answer_file() -> click.Option:
    return click.Option(
        ["--out", "-o"],
        type=OUT_FILE,
        expose_value=False,
        callback=set_out_file,
        help="Write the answer to this file.  [default: standard output]",
    )


verb: Callable[..., Callable[[Callable[..., Any]], Verb]] = partial(click.command, cls=Verb)
