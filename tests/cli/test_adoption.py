"""One line to adopt: pytest plugin, GitHub Action and hook, each run from an installed wheel.

The repository that adopts has two files.  The simulator is a line through 34b-general, as ``floor:line`` fits
it; a commit that makes each token 22 % slower must turn everything red.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from git_commands import git
from simulator_program import simulator_program

ROOT = Path(__file__).parents[2]
COEFFICIENTS = ROOT / "blis" / "releases" / "coefficients"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
GAP_US, SLOWER_US = 16_360, 20_000
MINE = simulator_program("51_590", GAP_US, {"name": "mine", "fitted_on": ["34b-general"]})
TEST = """
import pytest

@pytest.mark.parametrize("experiment", ["34b-general"])
def test_fidelity(blis_replay, experiment):
    blis_replay(experiment, simulator="cmd:python mine.py").passes()
"""
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: what is built beside the sources would be read as sources by tests."""
    folder = tmp_path_factory.mktemp("wheel")
    kept = ("base", "blis", "fixtures", "ingest", "recorder", "replay", "validate")
    for name in kept:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-c", BUILD, folder]
    built = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, check=True)
    return folder / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with our dependencies, and blis-replay not in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("BLIS_REPLAY", "GITHUB"))}
    return outside | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What its owner writes: a simulator and a test."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "test_fidelity.py").write_text(TEST)
    return tmp_path


def make_slower(repository: Path) -> None:
    mine = repository / "mine.py"
    mine.write_text(mine.read_text().replace(str(GAP_US), str(SLOWER_US)))


def bash(script: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step of a composite action with ``shell: bash``."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def act(folder: Path, environment: dict[str, str], **given: str) -> dict[str, str]:
    """Run the steps of action.yml; its output and what the job shows."""
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    inputs = {name: of.get("default", "") for name, of in action["inputs"].items()} | given
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    printed = ""
    for step in action["runs"]["steps"]:
        own = {name: inputs[value.split("inputs.")[1].split()[0]] for name, value in step.get("env", {}).items()}
        ended = bash(step["run"], folder, environment | own | {name: str(file) for name, file in files.items()})
        printed += ended.stdout + ended.stderr
    shown = {name: file.read_text() for name, file in files.items()}
    return {"code": str(ended.returncode), "printed": printed, **shown}


def test_everything_is_green_and_turns_red_with_the_commit_that_is_slower(
    wheel: Path, environment: dict[str, str], repository: Path
) -> None:
    given = {"simulator": "cmd:python mine.py", "install": f"--no-index --no-deps {wheel}"}
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))[0]
    push = f"{hook['entry']} 34b-general --simulator 'cmd:python mine.py'"
    test = "python -m pytest -q -p no:cacheprovider -o addopts= test_fidelity.py"

    green = act(repository, environment, **given)
    assert (green["code"], green["GITHUB_OUTPUT"]) == ("0", "exit-code=0\n"), green["printed"]
    assert "::notice title=FITS 34b-general::" in green["printed"]
    assert green["GITHUB_STEP_SUMMARY"].startswith("## FITS: cmd:")
    assert "●" in green["GITHUB_STEP_SUMMARY"]
    assert bash(push, repository, environment).returncode == 0
    passed = bash(test, repository, environment)
    assert (passed.returncode, "1 passed" in passed.stdout) == (0, True), passed.stdout

    make_slower(repository)
    red = act(repository, environment, **given, laws="true")
    assert (red["code"], red["GITHUB_OUTPUT"]) == ("1", "exit-code=1\n"), red["printed"]
    assert "::error title=FAIL 34b-general::E2E" in red["printed"]
    assert "| own trace |" in red["GITHUB_STEP_SUMMARY"]
    out = repository / "blis-replay-ci"
    assert json.loads((out / "badge.json").read_text())["message"] == "FAIL 0/1"
    assert ElementTree.parse(out / "badge.svg").getroot().tag.endswith("svg")  # noqa: S314 (our own text)
    assert ElementTree.parse(out / "junit.xml").getroot().get("failures") != "0"  # noqa: S314
    assert bash(push, repository, environment).returncode == 1
    failed = bash(test, repository, environment)
    assert (failed.returncode, "FAIL  34b-general: E2E over-predicted by" in failed.stdout) == (1, True), failed.stdout

    # What cannot be read is said by the output too, and no badge of the run before is left.
    unread = act(repository, environment, **given, recordings="nowhere")
    assert (unread["code"], unread["GITHUB_OUTPUT"], (out / "badge.json").exists()) == ("4", "exit-code=4\n", False)

    (repository / "mine.py").write_text("raise SystemExit('no such model')")
    broken = bash(test, repository, environment).stdout
    said = "34b-general: cmd:python mine.py ended with exit code 1: no such model"
    assert (said in broken, "site-packages" in broken, "During handling" in broken) == (True, False, False)


def test_the_steps_of_the_page_gate_a_release_against_the_one_of_the_target_branch(
    wheel: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The published direct calibration is worse on 34b-roleplay than the release that ships, and not the other way."""
    page = (ROOT / "docs" / "release-in-ci.md").read_text("utf-8")
    (block,) = re.findall(r"```yaml\n(steps:.*?)```", page, re.DOTALL)
    _, show, gate = yaml.safe_load(block)["steps"]
    given = gate["with"] | {"recordings": "", "experiments": "34b-roleplay"}
    given |= {"install": f"--no-index --no-deps {wheel}", "policy": "policy.yaml"}
    (tmp_path / "policy.yaml").write_text("schema: blis-replay/gate-policy/1\nheld_out_only: false\n")
    release = tmp_path / given["gate"]
    release.parent.mkdir()
    git(tmp_path, "init", "-q", "-b", "main")
    for (before, after), code in (
        (("stepml-direct", "h100-vllm-0.15.1"), "0"),
        (("h100-vllm-0.15.1", "stepml-direct"), "1"),
    ):
        release.write_text((COEFFICIENTS / f"{before}.yaml").read_text("utf-8"))
        git(tmp_path, "add", "-f", "coefficients")
        git(tmp_path, "commit", "-qm", before)
        # What `actions/checkout` leaves of the target branch.
        git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
        release.write_text((COEFFICIENTS / f"{after}.yaml").read_text("utf-8"))
        assert bash(show["run"], tmp_path, environment | {"GITHUB_BASE_REF": "main"}).returncode == 0
        ended = act(tmp_path, environment, **given)
        assert (ended["code"], ended["GITHUB_OUTPUT"]) == (code, f"exit-code={code}\n"), ended["printed"]
        verdict = "PASS" if code == "0" else "FAIL"
        assert ended["GITHUB_STEP_SUMMARY"].startswith(f"## {verdict}: coefficient gate")
    assert ElementTree.parse(tmp_path / "blis-replay-ci" / "junit.xml").getroot().get("failures") != "0"  # noqa: S314


def test_the_plugin_costs_nothing_before_its_fixture_is_used(environment: dict[str, str], tmp_path: Path) -> None:
    """pytest imports the plugin; no module of ours with data or numbers is loaded by that."""
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_other():\n"
        "    ours = {name for name in sys.modules if name.startswith('blis_replay')}\n"
        "    assert ours <= {'blis_replay', 'blis_replay.validate', 'blis_replay.validate.pytest_plugin'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_other.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
