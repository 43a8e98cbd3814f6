"""A stand-in for the BLIS binary: a script that takes its flags and files, and answers as told."""

from __future__ import annotations

import sys
from pathlib import Path

HELP_CURRENT = """Replay a TraceV2 file through the discrete-event simulation.

Flags:
      --alpha-coeffs float64Slice            Comma-separated alpha coefficients
      --beta-coeffs float64Slice             Comma-separated beta coefficients
      --block-size-in-tokens int             Number of tokens in a KV block (default 16)
      --cache-signal-delay int               Delay of the prefix-cache signal in microseconds (default 50000)
      --hardware string                      GPU type
      --horizon int                          Simulation horizon in microseconds
      --latency-model string                 Latency model backend: roofline, trained-physics
      --log string                           Log level
      --long-prefill-token-threshold int     Cap on prefill tokens of a request in a step
      --max-model-len int                    Maximum context length
      --max-num-batched-tokens int           New-token budget of a step (default 2048)
      --max-num-seqs int                     Maximum number of running requests (default 256)
      --metrics-path string                  Metrics file
      --model string                         LLM name
      --results-path string                  SimResult JSON file
      --seed int                             Seed (default 42)
      --total-kv-blocks int                  KV blocks (default 1000000)
      --tp int                               Tensor parallelism
      --trace-data string                    TraceV2 data
      --trace-header string                  TraceV2 header
"""
HELP_BLACKBOX = HELP_CURRENT.replace("roofline, trained-physics", "blackbox, roofline, trained-physics")
HELP_OLDER = (
    HELP_BLACKBOX.replace("--max-num-seqs", "--max-num-running-reqs")
    .replace("--max-num-batched-tokens", "--max-num-scheduled-tokens")
    .replace("      --metrics-path string                  Metrics file\n", "")
    .replace("      --cache-signal-delay int ", "      --snapshot-interval int  ")
)

_HEAD = """#!{python} -IS
import csv, gzip, json, os, sys, time
if "--help" in sys.argv:
    print({help!r})
    sys.exit(0)
option = dict(zip(sys.argv[2::2], sys.argv[3::2]))
rows = list(csv.DictReader(open(option["--trace-data"])))
header = open(option["--trace-header"]).read()
json.dump({{"arguments": sys.argv[1:], "header": header, "rows": rows, "folder": os.getcwd()}},
          open({log!r}, "w"))

def write(answers):
    json.dump(answers, open(option["--results-path"], "w"))

def plain(ttft_us=20_000, gap_us=10_000):
    return [dict(request_id=int(row["request_id"]), ttft_us=ttft_us,
                 e2e_us=ttft_us + gap_us * (int(row["output_tokens"]) - 1),
                 input_tokens=int(row["input_tokens"]), output_tokens=int(row["output_tokens"])) for row in rows]

"""


def write_stand_in(folder: Path, behaviour: str = "write(plain())", help_text: str = HELP_CURRENT) -> Path:
    """An executable ``folder/blis`` that runs the Python lines of ``behaviour``.

    They see ``option`` (by flag), ``rows`` and ``header`` of the trace, ``plain()`` (20 ms to
    the first token and 10 ms to each other) and ``write(answers)``.  What it was called
    with is in ``folder/called.json`` afterwards.
    """
    path = folder / "blis"
    head = _HEAD.format(python=sys.executable, help=help_text, log=str(folder / "called.json"))
    path.write_text(head + behaviour + "\n", "utf-8")
    path.chmod(0o755)
    return path


def answer_from(results: Path) -> str:
    """The behaviour of a recorded build: its answers, if it is asked for the very same requests."""
    return f"""answers = json.load(gzip.open({str(results)!r}))
asked = [(int(r["request_id"]), int(r["input_tokens"]), int(r["output_tokens"])) for r in rows]
if asked != [(a["request_id"], a["input_tokens"], a["output_tokens"]) for a in answers]:
    sys.exit("these are not the recorded requests")
write(answers)"""
