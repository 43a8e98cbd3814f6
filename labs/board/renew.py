"""Renew the leaderboards of labs/docs/simulators.md, which need simulators that most machines do not have.

    python -m blis_replay_labs.board.renew [shipped|live|blis|pack ...] [--only SIMULATOR,...]

Environment variables: DYNAMO, AIC and VIDUR are Pythons, DATA is the folder of the recordings.  The commands of the
page run in a temporary folder, and their answers are kept in ``labs/docs/simulators.json``.  ``--only``: replace the
rows of these simulators only.  ``scripts/docs.py`` makes the tables from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blis_replay.ingest.tables import Table
from blis_replay.validate.text.answer import markdown
from blis_replay_labs.board.leaderboard_text import board_of, board_tables, cost_table

KEPT = Path(__file__).parents[1] / "docs" / "simulators.json"
_OTHERS = "dynamo:$DYNAMO,dynamo-fitted:$DYNAMO,aiconfigurator:$AIC,vidur-fitted:$VIDUR"
_OURS = "embedded,floor:constant,floor:line"
_RTX = "$DATA/llmservingsim"
# Each writes its answers into files board*.json.
COMMANDS: dict[str, tuple[str, ...]] = {
    "shipped": (
        "blis-replay compare 34b-general 34b-codegen 7b-codegen 70b-general mixtral-general 7b-train \\",
        f"  --simulators all,vidur:$VIDUR,{_OTHERS} --explain --json > board.json",
    ),
    "live": (
        "blis-replay compare tiny-live-a tiny-live-a2 tiny-live-b tiny-live-c tiny-live-d tiny-live-e \\",
        "  --coefficients cpu-vllm-0.32.0 --explain --json \\",
        f"  --simulators {_OURS},dynamo:$DYNAMO,dynamo-fitted:$DYNAMO,vidur-fitted:$VIDUR > board.json",
    ),
    "blis": (
        "blis-replay compare 34b-codegen 34b-roleplay 70b-hf-codegen 70b-roleplay mixtral-codegen mixtral-general \\",
        "  mixtral-roleplay --simulators all,dynamo-fitted:$DYNAMO,vidur-fitted:$VIDUR --explain --json > board.json",
    ),
    "pack": (
        f"mkdir rtx6000 && cp {_RTX}/RTXPRO6000/Qwen3-32B/vllm/*.json* rtx6000",
        r"printf 'model: Qwen/Qwen3-32B\nhardware: RTX PRO 6000\ntensor_parallelism: 2\n' > rtx6000/exp-config.yaml",
        "echo 'max_model_len: 40960' > rtx6000.yaml",
        "blis-replay ingest rtx6000 --name rtx6000 --engine rtx6000.yaml",
        f"blis-replay ingest {_RTX}/RTX4090/Llama-3.1-8B/vllm --name rtx4090",
        "blis-replay ingest $DATA/blis-eval/jan20-codellama-train-1",
        "blis-replay calibrate --train rtx4090 --train 34b-train --out one.yaml",
        "blis-replay calibrate --train rtx6000 --out two.yaml",
        f"cp {_RTX}/RTX4090/Llama-3.1-8B/outputs/sim.csv.gz rtx4090.csv.gz",
        f"cp {_RTX}/RTXPRO6000/Qwen3-32B/outputs/sim.csv.gz rtx6000.csv.gz",
        "blis-replay compare rtx4090 34b-train --coefficients one.yaml --explain --json \\",
        f"  --simulators {_OURS},{_OTHERS},llmservingsim:rtx4090.csv.gz > board-1.json",
        "blis-replay compare rtx6000 --coefficients two.yaml --explain --json \\",
        f"  --simulators {_OURS},{_OTHERS},llmservingsim:rtx6000.csv.gz > board-2.json",
    ),
}
# Fields of a score that no table shows.
_LEFT_OUT = ("not_modelled", "cost_not_told", "slug", "coefficients")


def board_lines(name: str) -> list[str]:
    """A kept board as the page shows it: the means, one table per recording, and the commands."""
    board = board_of(json.loads(KEPT.read_text("utf-8"))[name])
    summary, *runs = board_tables(board)
    lines = [*_lines(summary), "", *_lines(cost_table(board)), ""]
    for table in runs:
        named = f"<code>{table.title}</code>{f' ({table.note})' if table.note else ''}"
        lines += [f"<details markdown><summary>{named}</summary>", "", *_lines(table), "", "</details>", ""]
    return [*lines, "```sh", *COMMANDS[name], "```"]


def _lines(table: Table) -> list[str]:
    # Without the backslash before an @, which the site would show.
    return markdown(table).replace("\\@", "@").splitlines()


def renewed(name: str, only: str = "") -> dict[str, Any]:
    """Run the commands of a board, with all its simulators or with ``only`` those named; their answers."""
    with TemporaryDirectory() as folder:
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        surroundings = os.environ | {"PATH": paths, "BLIS_REPLAY_STORE": f"{folder}/store.duckdb"}
        script = "set -euo pipefail\n" + "\n".join(COMMANDS[name])
        script = re.sub(r"(?<=--simulators )\S+", only, script) if only else script
        subprocess.run(["bash", "-c", script], cwd=folder, env=surroundings, check=True)  # noqa: S603, S607 (our own)
        return kept_of([json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("board*.json"))])


def kept_of(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of JSON answers of ``compare --simulators`` that is kept."""
    scores = [
        {key: _rounded(value) for key, value in score.items() if key not in _LEFT_OUT}
        for document in documents
        for score in document["scores"]
    ]
    return {"simulators": list(dict.fromkeys(score["simulator"] for score in scores)), "scores": scores}


def _text(kept: Mapping[str, Any]) -> str:
    """As JSON, one score per line."""
    boards = [
        f'"{name}": {{"simulators": {json.dumps(board["simulators"])}, "scores": [\n'
        + ",\n".join(map(json.dumps, board["scores"]))
        + "\n]}"
        for name, board in kept.items()
    ]
    return "{" + ",\n".join(boards) + "}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    """Renew the boards that are named, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", nargs="*", help=", ".join(COMMANDS))
    parser.add_argument("--only", default="", help="as for `compare --simulators`")
    given = parser.parse_args()
    if unknown := set(given.board) - COMMANDS.keys():
        parser.error(f"no such board: {', '.join(sorted(unknown))}")
    for name in given.board or COMMANDS:
        new = renewed(name, given.only)
        kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
        kept[name] = merged(kept[name], new) if given.only else new
        KEPT.write_text(_text(kept), "utf-8")
    return 0


def merged(board: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A kept board with some simulators' rows replaced; a new one goes before others of its kind, else last."""
    names = list(board["simulators"])
    for name in new["simulators"]:
        if name not in names:
            kin = (at for at, other in enumerate(names) if other.split("-")[0] == name.split("-")[0])
            names.insert(next(kin, len(names)), name)
    others = [score for score in board["scores"] if score["simulator"] not in new["simulators"]]
    scores = sorted([*others, *new["scores"]], key=lambda score: names.index(score["simulator"]))
    return {"simulators": names, "scores": scores}


if __name__ == "__main__":
    sys.exit(main())
