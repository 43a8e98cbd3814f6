"""Coverage-guided fuzzing of the readers: ``python scripts/fuzz.py TARGET [--seconds N] [--corpus DIR]``.

The rules are those of ``fuzz_targets``; besides, an input may take a second or so, and a bounded
memory.  An input that breaks a rule is left in the working directory (``crash-*``, ``timeout-*``, ``oom-*``); give its
path in place of ``--seconds`` to see it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("this needs atheris, which is not among the project's requirements: python -m pip install atheris")

import blis_replay.ingest.scan

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # inputs are too small to be shared among threads

# What is compiled is imported before, because it cannot be instrumented.
for module in iter_modules(blis_replay.ingest.scan.__path__, "blis_replay.ingest.scan."):
    import_module(module.name)

with atheris.instrument_imports(include=["blis_replay"], enable_loader_override=False):
    from fuzz_targets import TARGETS, Target

SECONDS_AN_INPUT = 10
RSS_LIMIT_MB = 2500
MAX_INPUT_BYTES = 1 << 14


def main(arguments: Sequence[str]) -> None:
    """Fuzz one target for so many seconds, or run it on the inputs given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("inputs", nargs="*", type=Path, help="inputs to run instead of fuzzing")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="inputs to start from, and where interesting ones are kept")
    given = parser.parse_args(arguments)
    target = TARGETS[given.target]
    with tempfile.TemporaryDirectory(prefix="blis-replay-fuzz-") as scratch:
        folder = Path(scratch)
        (folder / "work").mkdir()
        if given.inputs:
            for path in given.inputs:
                target.run(path.read_bytes(), folder / "work")
            return
        # The fuzzer ends its process where it stands: a child, so that the folder is taken away.
        if not (child := os.fork()):
            _fuzz(target, given.seconds, given.corpus or folder / "corpus", folder)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _fuzz(target: Target, seconds: int, corpus: Path, folder: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    (folder / "seeds").mkdir()
    for number, content in enumerate(target.seeds()):
        target.run(content, folder / "work")  # loads and compiles what it needs, before the clock runs
        (folder / "seeds" / f"{number:03d}").write_bytes(content)
    warnings.simplefilter("error")

    def run(data: bytes) -> None:
        try:
            target.run(data, folder / "work")
        except BaseException:
            # The alarm that watches for hangs can end the process before the fuzzer has kept the input.
            Path(f"crash-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}").write_bytes(data)
            raise

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)  # noqa: S311 - the fuzzer's own seed
        if rng.random() < 0.1:
            return bytes(atheris.Mutate(data, max_size))
        return rng.choice(target.mutators)(data, rng)[:max_size]

    limits = [f"-max_total_time={seconds}", f"-timeout={SECONDS_AN_INPUT}", f"-rss_limit_mb={RSS_LIMIT_MB}"]
    options = [*limits, f"-max_len={MAX_INPUT_BYTES}", "-print_final_stats=1", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(folder / "seeds")], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
