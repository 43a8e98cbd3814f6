"""One grammar of all verbs: the same forms, the same names for the same things, in the same order."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import click
import pytest
from command_line import Answer, Run
from docs_generated import verbs

from blis_replay.validate.cli.main import VERBS, cli
from blis_replay.validate.cli.options import COMMON

# What says what is looked at stands before what it is looked at with, where it goes, how it runs and how it is shown.
ORDER = (
    *("--requests", "--train", "--experiment", "--all"),
    *("--coefficients", "--baseline", "--replay"),
    *("--out", "--jobs", "--store", "--json", "--csv", "--markdown"),
    *("--verbose", "--quiet"),
)
SHORT = {"--experiment": "-e", "--out": "-o", "--verbose": "-v", "--quiet": "-q"}
# The forms of its output are documents one after the other while a server runs, which no table can be.
STREAMS = {"record"}


CONTEXT = click.Context(cli, info_name="blis-replay", **cli.context_settings)
# Every command with its name, those of groups too.
COMMANDS = {
    verb.command_path.removeprefix("blis-replay "): verb.command
    for verb in verbs(cli, CONTEXT)
    if not isinstance(verb.command, click.Group)
}


def options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long name, in the order of its help."""
    return {max(o.opts, key=len): o for o in command.params if isinstance(o, click.Option)}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_in_every_form(name: str) -> None:
    forms = {"--json", "--csv", "--markdown"} & set(options(COMMANDS[name]))
    assert forms == ({"--json"} if name in STREAMS else {"--json", "--csv", "--markdown"})


@pytest.mark.parametrize("name", COMMANDS)
def test_options_stand_in_one_order(name: str) -> None:
    shared = [option for option in options(COMMANDS[name]) if option in ORDER]
    assert shared == sorted(shared, key=ORDER.index)


@pytest.mark.parametrize("name", COMMANDS)
def test_short_names_are_the_same_everywhere(name: str) -> None:
    """What has the long option has its short one; a verb that answers can write the answer to a file."""
    known = options(COMMANDS[name])
    assert {long for long in SHORT if long in known and SHORT[long] not in known[long].opts} == set()
    assert name in STREAMS or {"--out", "--verbose", "--quiet"} <= set(known)


def test_help_lists_verbs_under_headings_and_common_options_apart(run: Run) -> None:
    listed = run("--help").out
    assert re.findall(r"^(\w[\w ]+):$", listed, re.M) == [
        "Options",
        "Judge",
        "Recordings",
        "Coefficients",
        "More",
        "Labs",
        "Common options of verbs",
    ]
    assert re.findall(r"^(\w[\w ]+):$", run("validate", "--help").out, re.M) == ["Options", "Common options"]


@pytest.mark.slow
def test_an_answer_goes_to_the_file_that_is_named_and_quiet_prints_nothing(run: Run) -> None:
    assert run("list", "-o", "list.csv").out == ""
    assert Path("list.csv").read_text() == run("list", "--csv").out
    assert run("list", "-q") == Answer(0, "", "")
    assert run("list", "--json", "-o", "json.txt").out == ""
    assert Path("json.txt").read_text() == run("list", "--json").out
    for form, ending in (("json", "json"), ("csv", "csv"), ("markdown", "md")):
        run("list", "-o", f"list.{ending}")
        assert Path(f"list.{ending}").read_text() == run("list", f"--{form}").out


@pytest.mark.slow
def test_experiments_are_positional_or_options(run: Run) -> None:
    one, other = run("inspect", "34b-general", "--json"), run("inspect", "-e", "34b-gen*", "--json")
    assert one.json["slug"] == other.json["slug"] == "20260218-150304-codellama-34b-tp2-general"


@pytest.mark.parametrize("option", [("--color", "always"), ("--color=always",), ("--debug",), ("--lock-timeout", "5")])
def test_an_option_of_the_program_may_stand_behind_the_verb(run: Run, option: tuple[str, ...]) -> None:
    assert run("inspect", "--checks", *option) == run(*option, "inspect", "--checks")


def test_what_stands_behind_two_dashes_belongs_to_another_program(run: Run) -> None:
    assert "is not a directory" not in run("record", "--out", "runs", "--", "true", "--debug", "--nonsense").err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_has_at_most_40_lines_of_80_columns(name: str, run: Run) -> None:
    """But for those of labs, which have 100 columns."""
    lines = run(*name.split(), "--help").out.splitlines()
    most = (40, 80) if name.split()[0] in VERBS else (len(lines), 100)
    assert (len(lines) <= most[0], max(map(len, lines)) <= most[1]) == (True, True)


def test_options_that_verbs_have_in_common_are_explained_once() -> None:
    named = {name for names in COMMON for name in re.findall(r"--[a-z]+", names)}
    bare = {long for command in COMMANDS.values() for long, option in options(command).items() if not option.help}
    assert bare - {"--train"} <= named  # which is what `calibrate` calls its experiments


def test_help_promises_more_only_where_there_is_a_longer_form() -> None:
    """Those with ``Answer.brief``; all other answers are whole."""
    longer = {
        name for name, command in COMMANDS.items() if (option := options(command).get("--verbose")) and option.help
    }
    assert longer == {"validate", "list", "compare", "verify"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "-o", ""),
        ("validate", "tiny-live-a", "-o", ""),
        ("list", "--store", ""),
        ("coefficients", "show", ""),
        ("validate", "tiny-live-a", "--coefficients", ""),
        ("simulate", "tiny-live-a", "--to", "mooncake", "--out", ""),
    ],
)
def test_an_empty_value_is_called_empty(run: Run, arguments: tuple[str, ...]) -> None:
    """As of a variable of the shell that is not set."""
    answer = run(*arguments)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert " is empty; name a " in answer.err


def test_the_list_of_checks_takes_no_experiment(run: Run) -> None:
    answer = run("inspect", "34b-general", "--checks")
    assert (answer.code, answer.out) == (2, "")
    assert "--checks lists the instrument checks of no experiment; leave 34b-general out" in answer.err


def test_one_name_has_one_kind_of_value() -> None:
    """What an option is called in help is the same; --out is a file or a folder, --from and --to a time or a format."""
    shown: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        context = click.Context(command)
        for name, option in options(command).items():
            if not option.is_flag and name not in ("--out", "--from", "--to"):
                shown.setdefault(name, set()).add(option.make_metavar(context))
    odd = {name: kinds for name, kinds in shown.items() if len(kinds) > 1}
    assert odd == {}


# A command each that is quick and needs no recording, with the rows that its table has.
TABLES = {
    ("list",): 23,
    ("coefficients", "list"): 7,
    # 4 models of 13 fields and more each
    ("coefficients", "show", "stepml-direct"): None,
    ("inspect", "--checks"): 15,
    ("inspect", "--experiment", "34b-general"): None,
    # severity and message of the finding, its measured values, and a table of published ITLs
    ("inspect", "--experiment", "34b-general", "--check", "token_events"): None,
    ("validate", "--experiment", "34b-codegen"): 16,
    ("compare", "34b-codegen", "34b-general"): 16,
    # error, scheduling mode and no component, of mean and p99 of three metrics
    ("explain", "--experiment", "34b-codegen", "--replay", "scheduling=synchronous"): 18,
    ("simulate", "--experiment", "34b-general", "--set", "max_num_seqs=64"): 2,
    ("doctor",): None,
}


@pytest.mark.slow
@pytest.mark.usefixtures("all_bundled")
@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_forms_hold_the_same_rows(run: Run, command: tuple[str, ...]) -> None:
    """CSV has a header and a row each, Markdown one line more, and JSON is JSON."""
    answer = run(*command, "--csv")
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    expected = TABLES[command]
    assert len(rows) == expected if expected is not None else len(rows) > 3
    assert None not in {key for row in rows for key in row}
    assert len(run(*command, "--markdown").out.splitlines()) == len(rows) + 2
    assert run(*command, "--json").json is not None


@pytest.mark.slow
def test_what_writes_files_answers_with_one_row(run: Run) -> None:
    export = ("simulate", "--experiment", "34b-codegen", "--to", "tracev2", "--force")
    (row,) = csv.DictReader(io.StringIO(run(*export, "--csv").out))
    assert row["files"] == "34b-codegen-tracev2/trace.yaml; 34b-codegen-tracev2/trace.csv"
    assert run(*export, "--json").json["requests"] == int(row["requests"]) == 9000


@pytest.mark.slow
def test_experiments_are_selected_by_patterns_everywhere(run: Run) -> None:
    """34b-codegen and 34b-general, and none of the 34b runs that play roles or reason."""
    answer = run("validate", "--experiment", "34b-[cg]*", "--csv")
    assert {row["alias"] for row in csv.DictReader(io.StringIO(answer.out))} == {"34b-codegen", "34b-general"}


@pytest.mark.slow
@pytest.mark.usefixtures("all_bundled")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("validate 34b-codegen 34b-general --by-stage", marks=pytest.mark.heavy),
        "explain 34b-codegen --replay scheduling=synchronous,prefix=none",
        # 7 blocks hold no request: why, comes from the other process too.
        "simulate 34b-codegen --sweep num_gpu_blocks=7,26603",
    ],
)
def test_an_answer_does_not_depend_on_the_processes(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.replay.executors.POOL_START_S", -1.0)  # a pool, however short the jobs
    alone, two = (run(*command.split(), "--json", "--jobs", jobs) for jobs in (1, 2))
    assert (alone.code, alone.json) == (two.code, two.json)
