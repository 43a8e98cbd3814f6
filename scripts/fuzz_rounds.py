"""Rounds of commands, each in a process of its own with limits on time and memory, and the rules that they keep."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.errors import printable
from blis_replay.validate.cli.main import main as blis_replay_main

MAX_CPU_SECONDS, MAX_RSS_MB, MAX_ADDRESS_MB = 60, 2_000, 12_000
ENGINE = "max_num_seqs: 64\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: false\n"
Arguments = tuple[str, ...]
# Those that say so themselves, in what they print.
_VERDICT = re.compile(r"fail|not decided|unusable|not judged|must not|FAIL|wrong", re.IGNORECASE)


@dataclass
class Ended:
    """How a command ended; ``problem``: the rule that it broke."""

    arguments: Arguments
    code: int
    problem: str = ""


def verb_of(arguments: Arguments) -> str:
    """The verb, with its second word if it has one."""
    return " ".join(arguments[: 2 if arguments[:1] == ("coefficients",) else 1]) or "-"


def called(arguments: Arguments) -> Ended:
    """Run a command in this process and look at what it did."""
    sys.argv = ["blis-replay", *arguments]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            blis_replay_main()
        return Ended(arguments, -1, "it does not end")
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        return Ended(arguments, -1, traceback.format_exc())
    return Ended(arguments, code, _problem(code, out.getvalue(), err.getvalue()))


def _problem(code: int, out: str, err: str) -> str:
    lines = err.splitlines()
    if "Traceback" in out + err or "Warning" in err:
        return f"a traceback or a warning: {err[-2000:]}"
    if code not in (0, 1, 2, 3):
        return f"exit code {code}: {err[-2000:]}"
    if code == 1 and not _VERDICT.search(out):
        return f"exit code 1 without a judgement: {err[-500:]} {out[-500:]}"
    if code in (2, 3) and not (lines or out):
        return f"exit code {code} without a word"
    if any(printable(line) != line for line in lines):
        return f"not printable: {err[-500:]!r}"
    return "an endless line" if any(len(line) > 3000 for line in lines) else ""


def in_process(folder: Path, work: Callable[[], Iterator[Ended]]) -> list[Ended]:
    """What ``work`` yields in a process of its own, in that folder; its end, time and memory are looked at too."""
    told = folder / "ended.jsonl"
    told.touch()
    if not (child := os.fork()):
        be_child(folder, told, work)
    _, status, used = os.wait4(child, 0)
    ended = [Ended(tuple(row[0]), row[1], row[2]) for row in map(json.loads, told.read_text("utf-8").splitlines())]
    last: Arguments = ended[-1].arguments if ended else ()
    if status:
        ended.append(Ended(last, -1, f"the process ended with status {status} after it, or in the next one"))
    if used.ru_maxrss > MAX_RSS_MB << 10:
        ended.append(Ended(last, -1, f"{used.ru_maxrss >> 10} MB of memory"))
    return ended


def be_child(folder: Path, told: Path, work: Callable[[], Iterator[Ended]]) -> None:
    """Go on as the process of a round, in its folder, until the work is done."""
    try:
        os.chdir(folder)
        os.environ |= {"BLIS_REPLAY_STORE": str(folder / "store.duckdb"), "TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_MB << 20, MAX_ADDRESS_MB << 20))
        signal.signal(signal.SIGPROF, _too_slow)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.simplefilter("error")
        with told.open("a", encoding="utf-8") as lines:
            begin = resource.getrusage(resource.RUSAGE_SELF)
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
            for ended in work():
                now = resource.getrusage(resource.RUSAGE_SELF)
                if now.ru_maxrss > MAX_RSS_MB << 10 >= begin.ru_maxrss:
                    ended.problem = ended.problem or f"{now.ru_maxrss >> 10} MB of memory"
                begin = now
                lines.write(json.dumps([ended.arguments, ended.code, ended.problem]) + "\n")
                lines.flush()
                signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _too_slow(*_signal: object) -> None:
    raise TimeoutError(f"more than {MAX_CPU_SECONDS} s of CPU time")


class Campaign:
    """Rounds of one kind, their counts, and where findings are kept."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.scratch = given, Path(tempfile.mkdtemp(prefix="blis-replay-fuzz-"))
        self.commands: Counter[tuple[str, int]] = Counter()
        # Of each verb: damaged recordings that it was given, and findings; what begins so is the name of one.
        self.met: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.damaged = ""
        self.rounds = self.findings = self.spans = 0
        self.known: set[str] = set()

    def run(self, work: Callable[[random.Random, Path], list[Ended]]) -> None:
        """Rounds until the time or their number is over, or until SIGTERM."""
        until, seed = time.monotonic() + self.given.seconds, self.given.seed
        asked_to_end: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: asked_to_end.append(number))
        while time.monotonic() < until and self.rounds < self.given.rounds and not asked_to_end:
            seed, self.rounds = seed + 1, self.rounds + 1
            folder = self.scratch / "round"
            folder.mkdir()
            (folder / "engine.yaml").write_text(ENGINE, "utf-8")
            ended = work(random.Random(seed), folder)  # noqa: S311 - the same again from its seed
            for one in ended:
                self.commands[verb_of(one.arguments), one.code] += 1
                if one.problem:
                    self._keep(seed, one, folder)
            self.met.update(verb for verb, _name in self._given_to_verbs(ended))
            shutil.rmtree(folder)
            if self.rounds % 4 == 0:
                self.say()
        self.say()
        if self.damaged:
            self._say_verbs()
        shutil.rmtree(self.scratch)

    def _given_to_verbs(self, ended: list[Ended]) -> set[tuple[str, str]]:
        """Each verb with the damaged recordings of a round that it was given; ``list`` is given all that are stored."""
        given = {
            (verb_of(one.arguments), word.partition("@")[0])
            for one in ended
            for word in one.arguments
            if self.damaged and word.startswith(self.damaged)
        }
        listed = [place for place, one in enumerate(ended) if verb_of(one.arguments) == "list"]
        before = ended[: listed[-1]] if listed else []
        stored = [one.arguments[1] for one in before if one.arguments[:1] == ("ingest",) and one.code == 0]
        return given | {("list", name) for name in stored}

    def _say_verbs(self) -> None:
        """A table: verb, damaged recordings that it was given, commands by exit code, findings."""
        codes = sorted({code for _verb, code in self.commands})
        print(f"| verb | recordings | {' | '.join(f'exit code {code}' for code in codes)} | findings |")
        print("|---|" + "---|" * (len(codes) + 2))
        for verb in sorted({verb for verb, _code in self.commands}):
            counts = [self.met[verb], *(self.commands[verb, code] for code in codes), self.found[verb]]
            print(f"| `{verb}` | {' | '.join(f'{count:,}' for count in counts)} |")

    def say(self) -> None:
        """One line: rounds, commands by exit code, findings."""
        codes: Counter[int] = Counter()
        for (_verb, code), count in self.commands.items():
            codes[code] += count
        print(
            f"{self.given.what}: {self.rounds} rounds, {sum(codes.values())} commands, by exit code "
            f"{dict(sorted(codes.items()))}, {self.findings} findings, {len(self.known)} different"
            + (f"; {self.spans} spans acknowledged" if self.spans else ""),
            flush=True,
        )

    def _keep(self, seed: int, one: Ended, folder: Path) -> None:
        self.findings += 1
        verb = verb_of(one.arguments)
        self.found[verb] += 1
        alike = f"{verb}: {re.sub(r'[0-9]+', '0', one.problem.strip().splitlines()[-1])[:150]}"
        if alike in self.known:
            return
        self.known.add(alike)
        kept = self.given.findings / f"{self.given.what}-{seed}-{verb.replace(' ', '-')}"
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        (kept / "problem.txt").write_text(f"{' '.join(one.arguments)}\n{one.problem}\n", "utf-8")
        print(f"seed {seed}: {' '.join(one.arguments)}: {one.problem[-600:]}", flush=True)
