"""The command line as a user calls it, in the same process."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Answer, Run

from blis_replay.ingest.ingest import ingest_source
from blis_replay.validate import STORE_DEFAULT, experiment
from blis_replay.validate.cli.main import main
from blis_replay_labs.planted.files import write_demo


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call blis-replay with these arguments, in an empty folder with a store of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("BLIS_REPLAY_STORE", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["blis-replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Answer(int(ended.value.code or 0), printed.out, printed.err)

    return call


@dataclass(frozen=True)
class Demo:
    """The synthetic experiment of 300 requests: its folder, and a store with nothing else in it."""

    folder: Path
    store: Path


@pytest.fixture(scope="session")
def made_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Made once for all tests, which work on copies: to write and read it takes longer than most of them."""
    made = tmp_path_factory.mktemp("demo")
    folder, store = made / write_demo(made).spec.slug, made / "store.duckdb"
    assert ingest_source(store, folder).outcome == "new"
    return Demo(folder, store)


@pytest.fixture
def demo(tmp_path: Path, made_demo: Demo) -> Path:
    """A complete synthetic experiment of 300 requests in the real file formats."""
    return shutil.copytree(made_demo.folder, tmp_path / made_demo.folder.name)


@pytest.fixture
def stored_demo(run: Run, demo: Path, made_demo: Demo) -> Path:
    """The same, and it is in the store that ``run`` uses."""
    STORE_DEFAULT.parent.mkdir()
    shutil.copy(made_demo.store, STORE_DEFAULT)
    return demo


@pytest.fixture(scope="session")
def both(made_demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the synthetic experiment and one that ships, only read: to bring that in takes half of a test."""
    path = Path(shutil.copy(made_demo.store, tmp_path_factory.mktemp("both")))
    experiment.stored_experiment(path, "34b-general")
    return path


@pytest.fixture
def shipped(run: Run, both: Path) -> None:
    """34b-general is in the store that ``run`` uses, as after its first use."""
    STORE_DEFAULT.parent.mkdir()
    shutil.copy(both, STORE_DEFAULT)


@pytest.fixture(scope="session")
def made_fit(made_demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Coefficients that are fitted to the synthetic experiment: mine.yaml, made once for all tests."""
    folder = tmp_path_factory.mktemp("fit")
    shutil.copy(made_demo.store, folder / "store.duckdb")
    command = ["calibrate", "--train", "1b-general", "--out", "mine.yaml", "--store", "store.duckdb"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["blis-replay", *command])
        main()
    assert ended.value.code == 0
    return folder / "mine.yaml"


@pytest.fixture
def calibrated(stored_demo: Path, made_fit: Path) -> Path:
    """The synthetic experiment, which is in the store, with coefficients of its own in mine.yaml."""
    shutil.copy(made_fit, "mine.yaml")
    return stored_demo


@pytest.fixture
def poor_release(run: Run) -> str:
    """release.yaml: published coefficients of another model, under the name of the synthetic one."""
    shown = run("coefficients", "show", "stepml-direct").out
    before, name, after = shown.replace("codellama/CodeLlama-34b-Instruct-hf", "synthetic/synthetic-1b").partition(
        "synthetic/synthetic-1b"
    )
    Path("release.yaml").write_text(before + name + after.replace("tensor_parallelism: 2", "tensor_parallelism: 1", 1))
    return "release.yaml"


@pytest.fixture
def none_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of ``--all`` that are not about what ships: to judge all of that takes a minute."""
    monkeypatch.setattr(experiment, "bundled_aliases", dict)


@pytest.fixture
def all_bundled(run: Run, bundled_store: Path) -> None:
    """All experiments that ship are in the store that ``run`` uses: to bring them there takes ten seconds."""
    STORE_DEFAULT.parent.mkdir()
    shutil.copy(bundled_store, STORE_DEFAULT)


MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]}) + "\n"
    for i in range(3)
)


@pytest.fixture
def mooncake(run: Run, tmp_path: Path) -> Path:
    """A stored arrival trace of three requests a second apart that share 512 of 600 tokens."""
    (tmp_path / "trace.jsonl").write_text(MOONCAKE, "utf-8")
    assert run("ingest", "trace.jsonl", "--name", "mooncake").code == 0
    return tmp_path
