"""The recorder on the engine core of the installed release: is its step log what the scheduler did?

    PYTHONPATH=vllm-0.24.0 oracle-env/bin/python scripts/oracle_recorder.py [--count N] [--seed S]

It runs random workloads of `vllm_oracle.py`, which has how to make its environment, with the recorder as the plugin
that vLLM loads, and compares each step log with the schedule that the oracle notes by itself: each request's tokens in
each step, and what it found cached. Exit codes: 0 all are equal, 1 one is not.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from oracle_engine import simulate
from oracle_vllm import SpecError, vllm_version
from oracle_workloads import SERIES

MAX_STEPS = 3_000


def main() -> int:
    """Run the workloads; prints one line, and one for each that differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=18, help="workloads, of which a third has speculative decoding")
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    equal = left_out = steps = cost_ns = 0
    absent: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        recorders = _recorders(Path(scratch))
        for number in range(given.count):
            spec = SERIES["draft" if number % 3 == 2 else "rand"](given.seed, number // 3)
            recorders.clear()
            try:
                schedule = simulate(spec, MAX_STEPS).schedule
            except SpecError as error:
                left_out += 1
                print(f"left out: {error}", flush=True)
                continue
            (recorder,) = recorders
            recorder._closed()
            log = _lines(recorder._writer.path)
            if difference := _difference(log, schedule):
                print(f"{spec['scenario']}: {difference}", flush=True)
            equal += not difference
            counts = log[-1][2]
            steps, cost_ns = steps + counts["steps"], cost_ns + counts["wrapper_ns"]
            absent |= set(log[0].get("absent") or ())
    ran, cost_us, lacks = given.count - left_out, cost_ns / 1000 / max(steps, 1), ", ".join(sorted(absent)) or "nothing"
    print(
        f"{vllm_version()}: {equal} of {ran} equal, {left_out} left out; {steps} steps, {cost_us:.1f} us each", end=""
    )
    print(f" in the recorder; absent: {lacks}")
    return 0 if equal == ran else 1


def _recorders(scratch: Path) -> list[Any]:
    """A list to which each recorder adds itself; the package, for nothing but the recorder, is laid into a folder."""
    (scratch / "blis_replay").mkdir()
    (scratch / "blis_replay" / "recorder").symlink_to(Path(__file__).parents[1] / "recorder")
    sys.path.insert(0, str(scratch))
    vllm_version()  # sets the environment of the oracle, with no platform
    from blis_replay.recorder import plugin

    made: list[Any] = []

    class Kept(plugin.Recorder):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    plugin.Recorder = Kept  # type: ignore[misc]
    (scratch / "logs").mkdir()
    os.environ[plugin.DIRECTORY] = str(scratch / "logs")
    plugin.register()
    return made


def _lines(path: str | Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _difference(log: list[Any], schedule: list[dict[str, Any]]) -> str:
    """Where a step log is not the schedule of the oracle, or not whole; ``""``: nowhere."""
    names = {line[1]: line[2] for line in log[1:] if line[0] == "a"}
    steps = [line for line in log[1:] if line[0] == "s"]
    if log[-1][0] != "end" or log[-1][2]["dropped"] or [line[1] for line in steps] != list(range(len(steps))):
        return f"it is not whole: {log[-1]}"
    recorded = [
        ({names[one]: 1 for one in ones} | {names[one]: tokens for one, tokens in more}, {names[n]: c for n, c in new})
        for *_times, ones, more, new, _preempted in steps
        if ones or more  # of a turn without tokens the oracle has no step
    ]
    noted = [(step["sched"], step.get("admitted", {})) for step in schedule]
    if len(recorded) != len(noted):
        return f"{len(recorded)} steps, of the oracle {len(noted)}"
    odd = next((n for n, (one, other) in enumerate(zip(recorded, noted, strict=True)) if one != other), None)
    return "" if odd is None else f"step {odd} is {recorded[odd]}, of the oracle {noted[odd]}"


if __name__ == "__main__":
    sys.exit(main())
