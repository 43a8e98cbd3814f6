"""A sound recording, a store with it, and every verb on it: what the rounds of ``fuzz_verbs`` damage, or kill."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz_rounds import ENGINE, Arguments, Campaign, Ended, called, in_process

from blis_replay.fixtures.planted import PLANTED
from blis_replay.fixtures.synthetic import generate, write_experiment
from blis_replay.ingest.recording import SharedPrefix, Stage

# What coefficients there are for; the recordings are said to be of it, so that they are simulated.
SERVED: dict[str, Any] = {"model": "codellama/CodeLlama-34b-Instruct-hf", "tensor_parallelism": 2}
DAMAGED, SOUND = "20260101-000000-damaged-34b-tp2-general", "sound-34b-tp2-codegen"
# Enough busy steps, of 0.2 s each, for four windows of 5 s that `calibrate` and its like need; 40 requests of them.
_STEPPED = replace(
    PLANTED,
    slug="20260101-000000-stepped-34b-tp2-codegen",
    model=SERVED["model"],
    tensor_parallelism=SERVED["tensor_parallelism"],
    stages=(Stage(0, 0.8, 22_000_000), Stage(1, 1.0, 22_000_000)),
    shared_prefix=SharedPrefix(2, 3, 64, 200, 30),
    latency=replace(PLANTED.latency, intercept_ns=200_000_000),
)
_STEPPED_FILES = ("exp-config.yaml", "profile.yaml", "trace.csv.gz", "traces.json", "vllm.log")
RELEASE = "h100-vllm-0.15.1"
SIMULATE = ("simulate", "--engine", "engine.yaml", "--coefficients", RELEASE, "--model", "codellama-34b-instruct-hf")


def verbs(name: str) -> list[Arguments]:
    """Every verb that is about an experiment; what they write lies in the working directory."""
    return [
        ("inspect", name),
        ("validate", name, "--json"),
        ("validate", name, "--replay", "scheduling=synchronous,prefix=none"),
        ("explain", name, "--workers", "1"),
        ("segments", name),
        ("compare", name, SOUND),
        ("compare", SOUND, name),
        ("compare", name, f"{name}@{RELEASE}"),
        ("report", name, "--out", "report.html"),
        ("timeline", name, "--for", "500ms", "--out", "trace.json"),
        *(("export", name, "--to", form, "--force") for form in ("tracev2", "legacy-csv", "mooncake", "parquet")),
        ("calibrate", name, "--out", "mine.yaml", "--force", "--workers", "1"),
        ("gate", "--coefficients", RELEASE, "--experiment", name, "--junit", "gate.xml"),
        ("whatif", name, "--set", "max_num_seqs=16"),
        (*SIMULATE, "--experiment", name, "--out", "run", "--force", "--csv-tables"),
        ("coefficients", "steps", name),
        ("coefficients", "generalize", "--lowo", name, SOUND, "--gpu", "H100-SXM"),
        ("list",),
    ]


def sound_store(campaign: Campaign) -> Path:
    """A store with one sound recording, made in a process of its own."""
    folder = campaign.scratch / "sound"
    folder.mkdir()
    (folder / "engine.yaml").write_text(ENGINE, "utf-8")
    sound = stepped(folder).rename(folder / SOUND)

    def commands() -> Iterator[Ended]:
        yield called(("ingest", sound.name))
        yield called(("validate", SOUND))
        for arguments in verbs(SOUND):
            called(arguments)
        (folder / "modules").write_text(" ".join(sys.modules), "utf-8")

    ended = in_process(folder, commands)
    if any(one.problem or one.code not in (0, 1) for one in ended):
        sys.exit(f"the sound recording is not: {ended}")
    for module in (folder / "modules").read_text("utf-8").split():  # what a child would load again and again
        with contextlib.suppress(ImportError):
            import_module(module)
    return folder / "store.duckdb"


def stepped(folder: Path) -> Path:
    """A recording with so many busy steps that coefficients can be fitted to it."""
    write_experiment(generate(_STEPPED), folder / _STEPPED.slug, files=_STEPPED_FILES)
    return folder / _STEPPED.slug


def is_there(name: str) -> Ended:
    """Whether a recording that was stored before is still there."""
    found = called(("inspect", name))
    return Ended(
        found.arguments, found.code, found.problem or ("" if found.code == 0 else "an older recording is lost")
    )
