"""What every verb answers on the recordings of the data pack, recorded and compared: before and after a change.

`record` ingests the recordings into a fresh store and calls the verbs, one after another in one process.  It writes a
JSON file per command: exit code, standard output and error, and the files written (long ones and tables as hashes).
Machine paths and durations are replaced.  A refused recording is an answer, and so is a crash.

`compare` prints every JSON path that differs, with the old and the new value, and exits 1 if there is one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

DATA = Path(os.environ.get("BLIS_REPLAY_DATA", Path(__file__).parents[2] / "shared" / "data"))
DIRECTORIES = ("h100/*", "vllm-traces/*/", "blis-eval/*", "llmservingsim/*/*/", "live-vllm-*/[A-Z]")
NAMED = ("vllm-traces/*/traces*", "clients/*/*", "public-traces/*/*", "blis-parity/*")
SLOW = "o100000000"  # Its replay takes minutes: one request of a hundred million tokens.
LONG_TEXT = 20_000  # Bytes of a file of which only a hash is kept.
ABSENT = "(absent)"

# A release of the models that none of ours has; its values are plausible and fitted to nothing.
MODELS = ("mock-model", "tiny", "codellama/CodeLlama-34b-Instruct-hf", "meta-llama/Llama-2-7b-hf")
RELEASE = """{schema: blis-replay/coefficients/1, name: made, status: valid, summary: Made up., source: nowhere,
hardware: none, models: ["""
ENTRY = """{{model: {}, tensor_parallelism: 1,
latency: {{kind: blackbox, intercept: 6 ms, per_prefill_token: 20 us/token, per_decode_token: 15 us/token,
rounding: truncate}}, lifecycle: {{pre_queue: 900 us, post_token: 20 us}}}}, """
INPUTS = {
    "made.yaml": RELEASE + "".join(map(ENTRY.format, MODELS)) + "]}",
    "engine.yaml": "{max_num_seqs: 128, max_num_batched_tokens: 2048, max_model_len: 200000, async_scheduling: false}",
    "load.yaml": """
schema: blis-replay/workload/1
seed: 42
requests: 500
clients:
  chat:
    rate_per_s: 5
    arrivals: {process: gamma, cv: 3}
    prompt_tokens: {distribution: normal, mean: 256, deviation: 50, min: 64, max: 512}
    output_tokens: {distribution: exponential, mean: 128}
    prefix: {group: system, tokens: 512, members: 4, place: before}
    conversations: {turns: 5, gap_s: 10}
""",
}
ABOUT_EACH = """
inspect
validate --by-stage $RELEASE
explain --executor serial $RELEASE
segments $RELEASE
coefficients steps $RELEASE
whatif --set max_num_seqs=32 --executor serial $RELEASE
export --to parquet --out out/requests.parquet
"""
CHOSEN = ("34b-general", "fcfs-async", "vllm-bench-0.15.1-random-poisson")
ABOUT_CHOSEN = """
validate --replay spec $RELEASE
validate --replay blis-spec $RELEASE
validate --replay scheduling=synchronous $RELEASE
validate --replay arrivals=flat --window 0.6:1 $RELEASE
explain --replay scheduling=synchronous --reference none --executor serial $RELEASE
segments --out out/requests.csv $RELEASE
whatif --sweep max_num_seqs=64,256 --sweep max_num_batched_tokens=1024,4096 --executor serial $RELEASE
timeline --from 2s --for 1500ms --out out/timeline.json $RELEASE
export --to tracev2 --out out
export --to legacy-csv --out out/load.csv
export --to mooncake --out out/load.jsonl
report --out out/report.html $RELEASE
"""
OTHERS = """
validate --all
validate --experiment 34b-general --experiment 34b-codegen --coefficients stepml-direct
coefficients steps --experiment 34b-general --coefficients stepml-direct
calibrate --train 34b-general --out out/fitted.yaml --executor serial
calibrate --train fcfs-async --out out/fitted.yaml --force --executor serial
calibrate --train 34b-codegen --from latencies --split 1:1 --out out/fitted.yaml --force --executor serial
gate --coefficients h100-vllm-0.15.1 --junit out/gate.xml --summary out/gate.md --executor serial
gate --coefficients stepml-direct --baseline h100-vllm-0.15.1 --experiment '34b-*' --executor serial
coefficients generalize --lomo --executor serial
coefficients generalize --lowo --model-form per-model --experiment '7b-[cg]*' --experiment '34b-[cg]*' --executor serial
compare --published
compare 34b-codegen 34b-general
compare 34b-general 34b-general@stepml-direct
compare fcfs-async fcfs-async-traces.json.gz
compare h100-vllm-0.15.1 stepml-direct --experiment 34b-codegen
compare embedded blis --experiment 34b-codegen
coefficients export-defaults made.yaml --out out/defaults.yaml
coefficients for-model $CONFIG --model org/new --out out/new.yaml
coefficients roofline $CONFIG --model org/new --out out/new.yaml
coefficients roofline $CONFIG --model org/new --efficiency DATA/blis-h100-mfu --mixed additive --out out/new.yaml
simulate --workload load.yaml $SETUP
simulate --experiment mooncake-conversation_trace.jsonl.gz $SETUP
simulate --workload load.yaml $SETUP --instances 3 --router weighted:prefix_affinity=3,queue_depth=2 --csv-tables
verify --quick
study list
study run --all --executor serial
doctor
"""
SHORT = {
    "$CONFIG": "DATA/h100-hardware/model_configs/Llama-2-7b-hf/config.json",
    "$SETUP": "--engine engine.yaml --coefficients made.yaml --model tiny --out out",
}


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Record or compare."""


@cli.command("record")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT_DIR")
@click.option("--data", type=click.Path(path_type=Path), default=DATA, show_default=True, help="The data pack.")
@click.option("--blis-replay", "other", type=click.Path(path_type=Path), help="Command of another installation.")
def record(out: Path, data: Path, other: Path | None) -> None:
    """Write the answer of each command into the new folder OUT_DIR: one JSON file per command."""
    if other:  # Its packages are those of the Python beside it.
        command = (other.absolute().parent / "python", __file__, "record", out, "--data", data)
        sys.exit(subprocess.call(command))
    # Not the console script, which may end the process.
    main = click.Command("main", callback=import_module("blis_replay.validate.cli.main").main)
    out.mkdir(parents=True)
    answers, data = out.resolve(), data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        places = {folder: "FOLDER", str(data): "DATA", sys.prefix: "VENV", str(Path.home()): "HOME"}
        os.chdir(folder)
        os.environ |= {"BLIS_REPLAY_STORE": "store.duckdb", "COLUMNS": "80", "NO_COLOR": "1"}
        Path("DATA").symlink_to(data)
        for name, text in INPUTS.items():
            Path(name).write_text(text, "utf-8")

        def ask(command: str, form: str = " --json") -> Any:
            for short, long in SHORT.items():
                command = command.replace(short, long)
            shutil.rmtree("out", ignore_errors=True)
            Path("out").mkdir()
            sys.argv = ["blis-replay", *shlex.split(command + form)]
            ended = CliRunner().invoke(main, [])  # It keeps the two streams apart, and survives a crash.
            crash = None if isinstance(ended.exception, SystemExit | None) else repr(ended.exception)
            said = json.loads(ended.stdout or "null") if form == " --json" else ended.stdout.splitlines()
            answer = {"command": command + form, "exit_code": ended.exit_code, "crash": crash, "answer": said}
            print(f"{ended.exit_code}: {command}{form}", file=sys.stderr)
            written = {path.name: _content(path) for path in sorted(Path("out").rglob("*.*"))}
            lasting = _lasting(answer | {"stderr": ended.stderr.splitlines(), "files": written}, places)
            name = re.sub(r"[^\w.=,@*-]+", "_", re.sub(r"\b[0-9a-f]{12}\b", "RUN", command) + form) + ".json"
            (answers / name).write_text(json.dumps(lasting, indent=1, ensure_ascii=False) + "\n", "utf-8")
            return said

        _ask_everything(ask)
        os.chdir("/")  # The folder goes.


def _ask_everything(ask: Callable[..., Any]) -> None:
    for path in (path for pattern in DIRECTORIES for path in sorted(Path("DATA").glob(pattern))):
        ask(f"ingest {path}")
    for path in (path for pattern in NAMED for path in sorted(Path("DATA").glob(pattern))):
        beside = path.parent / "exp-config.yaml"  # One format of traces at a time, of those that were recorded in all.
        with_configuration = f"{beside} " if beside.exists() else "--engine engine.yaml "
        ask(f"ingest {with_configuration}{path} --name {path.parent.name}-{path.name}")
    ask("ingest DATA/h100/20260218-150304-codellama-34b-tp2-general")  # Unchanged.
    for row in ask("list")["experiments"]:
        release = "" if row["hardware"] else "--coefficients made.yaml"
        is_chosen = row["alias"] in CHOSEN or row["slug"] in CHOSEN
        for line in _lines(ABOUT_EACH + ABOUT_CHOSEN * is_chosen):
            ask(f"{line.replace('$RELEASE', release)} --experiment {row['slug']}")
        for check in ask("inspect --checks") if is_chosen else ():
            ask(f"inspect --experiment {row['slug']} --check {check}")
    for line in _lines(OTHERS):
        ask(line)
    for release in ask("coefficients list")["releases"]:
        ask(f"coefficients show {release['name']}")
    for form in (" --csv", " --markdown", ""):
        for verb in (
            *("validate", "explain", "segments", "coefficients steps"),
            "inspect",
            "whatif --set max_num_seqs=32",
        ):
            ask(f"{verb} --experiment 34b-general", form)
    run = next(row["id"] for row in ask("compare --runs")["runs"] if row["slug"].endswith("34b-tp2-general"))
    ask(f"compare {run} 34b-general@h100-vllm-0.15.1")
    for path in sorted(Path("DATA").glob("attack/*/")):  # Last: what asks all experiments of a store would ask these.
        ask(f"ingest {path}")
        for verb in ("inspect", "validate", "segments")[: 1 if path.name == SLOW else 3]:
            ask(f"{verb} --experiment {path.name}")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def _content(path: Path) -> Any:
    """A short JSON document; lines of a short text; a hash for each column of a Parquet file, and of all else."""
    if path.suffix == ".parquet":
        import polars as pl

        columns = pl.read_parquet(path).iter_columns()
        return {column.name: f"{column.dtype} {_digest(column.to_frame().write_json().encode())}" for column in columns}
    content = path.read_bytes()
    if len(content) > LONG_TEXT:
        return f"{len(content)} bytes {_digest(content)}"
    return json.loads(content) if path.suffix == ".json" else content.decode("utf-8").splitlines()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _lasting(value: Any, places: dict[str, str]) -> Any:
    """The same without what another run on another machine would not repeat: paths and durations."""
    if isinstance(value, dict):
        return {key: "DURATION" if key == "seconds" else _lasting(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_lasting(item, places) for item in value]
    for place, name in places.items() if isinstance(value, str) else ():
        value = value.replace(place, name)
    return value


def differences(old: Any, new: Any, tolerance: float, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each JSON path at which two documents differ, with both values; numbers may differ by a share of themselves."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), tolerance, f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list):
        for index, (first, second) in enumerate(zip_longest(old, new, fillvalue=ABSENT)):
            yield from differences(first, second, tolerance, f"{path}[{index}]")
    elif {type(old), type(new)} <= {int, float}:
        if not math.isclose(old, new, rel_tol=tolerance) and not (math.isnan(old) and math.isnan(new)):
            yield path, old, new
    elif old != new or type(old) is not type(new):
        yield path, old, new


@cli.command("compare")
@click.argument("before", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("after", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--ignore", "ignored", multiple=True, metavar="PATTERN", help="A field, or FILE:PATH as 'whatif_*:*'.")
@click.option("--tolerance", default=1e-9, show_default=True, help="Of numbers, relative.")
def compare(before: Path, after: Path, ignored: tuple[str, ...], tolerance: float) -> None:
    """Print what differs between the recorded folders BEFORE and AFTER; exit code 1 if anything does."""
    found = 0
    for name in sorted({path.name for folder in (before, after) for path in folder.glob("*.json")}):
        old, new = (_read(folder / name) for folder in (before, after))
        for path, first, second in differences(old, new, tolerance):
            fields = re.findall(r"[^.\[\]]+", path)
            if not any(pattern in fields or fnmatchcase(f"{name}:{path}", pattern) for pattern in ignored):
                print(f"{name}: {path}: {json.dumps(first)[:200]} -> {json.dumps(second)[:200]}")
                found += 1
    print(f"{found} differences" if found else "all answers are equal")
    sys.exit(found > 0)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.exists() else ABSENT


if __name__ == "__main__":
    cli()
