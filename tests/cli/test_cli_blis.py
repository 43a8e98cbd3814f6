"""``blis-replay validate --simulator``: the BLIS binary as a user meets it, with a stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from blis_stand_in import HELP_BLACKBOX, write_stand_in
from command_line import Run

from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.validate import experiment

pytestmark = pytest.mark.slow

SLUG = "20260301-120000-synthetic-1b-tp1-general"


@pytest.fixture
def stored(calibrated: Path) -> str:
    """The slug of the synthetic experiment, ingested, with coefficients of its own in mine.yaml."""
    return calibrated.name


def test_blis_alone(run: Run, stored: str, tmp_path: Path) -> None:
    """The stand-in gives every token after the first 10 ms; single tokens it does not report."""
    path = write_stand_in(tmp_path)
    answer = run("validate", "--experiment", stored, "--simulator", "blis", "--blis-binary", path, "--json")
    (experiment,) = answer.json["experiments"]
    assert answer.code in (0, 1)
    assert experiment["provenance"]["simulator"] == "blis"
    assert experiment["provenance"]["coefficients"] == "blis-own-model"
    assert experiment["provenance"]["scheduling"] == "synchronous"
    assert experiment["metrics"]["itl"]["mean"]["simulated_ms"] == 10.0
    assert experiment["metrics"]["itl"]["p99"]["simulated_ms"] is None
    assert "no times of single tokens" in experiment["metrics"]["itl"]["p99"]["reason"]
    assert any("groups with a shared prefix" in line for line in experiment["known_differences"])


def test_a_blackbox_release_in_a_build_that_runs_it(run: Run, tmp_path: Path) -> None:
    """34b of stepml-direct: 14,196 us per step, no cost of a prefill token."""
    path = write_stand_in(tmp_path, help_text=HELP_BLACKBOX)
    answer = run(
        *("validate", "--experiment", "34b-general", "--coefficients", "stepml-direct"),
        *("--simulator", "blis", "--blis-binary", path, "--json"),
    )
    (experiment,) = answer.json["experiments"]
    assert experiment["provenance"]["coefficients"] == "stepml-direct"
    arguments = json.loads((tmp_path / "called.json").read_text())["arguments"]
    option = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert option["--latency-model"] == "blackbox"
    assert option["--beta-coeffs"].startswith("14196")
    assert option["--total-kv-blocks"] == "26602"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--simulator", "blis"], 2, "--simulator blis: the BLIS binary is not named; give --blis-binary PATH"),
        (["--simulator", "blis", "--blis-binary", "{}", "--coefficients", "stepml-direct"], 4, "has no blackbox model"),
        (["--simulator", "blis", "--blis-binary", "{}", "--simulator-timeout", "-1"], 2, "--simulator-timeout"),
        (["--simulator", "blis", "--blis-binary", "{}", "--simulator-timeout", "0.4"], 4, "did not end within 0.4 s"),
    ],
)
def test_what_goes_wrong_is_one_line(run: Run, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    path = write_stand_in(tmp_path, "time.sleep(30)")
    answer = run("validate", "--experiment", "34b-general", *(option.format(path) for option in options))
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert code == 2 or answer.err.count("\n") == 1


@pytest.mark.heavy
def test_all_names_what_blis_could_not_do(
    run: Run, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in one experiment is listed with its reason, the others go on: two that ship, and the one stored."""
    aliases = bundled_aliases()
    few = {alias: aliases[alias] for alias in ("34b-codegen", "7b-codegen")}
    monkeypatch.setattr(experiment, "bundled_aliases", lambda: few)
    path = write_stand_in(tmp_path, 'sys.exit("panic: nil map")')
    answer = run("validate", "--all", "--simulator", "blis", "--blis-binary", path)
    assert answer.code == 4
    assert answer.out.count("panic: nil map") == 1  # one line for all that have this reason
    reasons = run("validate", "--all", "--simulator", "blis", "--blis-binary", path, "--json").json["not_judged"]
    assert reasons.keys() == {*few, "1b-general"}
    assert all("panic: nil map" in reason for reason in reasons.values())
