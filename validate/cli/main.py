"""The ``blis-replay`` command: verbs are imported when they are used, so help is instant."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from blis_replay.blis.errors import SimulatorError
from blis_replay.ingest.errors import IngestError, UnknownExperimentError
from blis_replay.replay.errors import ReplayError, UnknownNameError
from blis_replay.validate.errors import ValidateError

# verb -> (module, one line of help); the module defines `command`.
VERBS = {
    "validate": ("validate_verb", "How far is the simulator from a recorded experiment?"),
    "experiments": ("experiments_verb", "List stored and bundled experiments."),
    "inspect": ("inspect_verb", "What a recording holds, and whether its instruments can be trusted."),
    "ingest": ("ingest_verb", "Read recordings of a real server into the store."),
    "coefficients": ("coefficients_verb", "List and show coefficient releases."),
    "calibrate": ("calibrate_verb", "Fit coefficients to recordings."),
}

EXIT_PASS, EXIT_FAIL, EXIT_USAGE, EXIT_BAD_DATA = 0, 1, 2, 3


class LazyGroup(click.Group):
    """A group that imports a verb's module when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of a first visit."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"blis_replay.validate.cli.{VERBS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blis-replay")
def cli() -> None:
    """Replay a recording of a real vLLM server through a simulator, and see how far
    the simulator is from it.

    \b
    Examples:
      blis-replay validate --experiment 34b-general
      blis-replay ingest runs/20260218-150304-codellama-34b-tp2-general
      blis-replay inspect --experiment 34b-general
      blis-replay validate --all --json

    Exit codes: 0 fine, 1 a threshold failed, 2 wrong use, 3 bad data or nothing to judge.
    """


def main() -> None:
    """Run the command line; errors a user can cause are one line on standard error."""
    try:
        code = cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; the store is as it was before", err=True)
        sys.exit(130)
    except (UnknownExperimentError, UnknownNameError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except (IngestError, SimulatorError, ReplayError, ValidateError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_BAD_DATA)
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        sys.stderr.close()
        sys.exit(EXIT_PASS)
    sys.exit(code if isinstance(code, int) else EXIT_PASS)


__all__ = ["cli", "main"]

if __name__ == "__main__":
    main()
