"""The program that runs one adapter: ``PYTHON run.py NAME [OPTION] FOLDER``.

``PYTHON`` has the simulator installed.  The adapter reads requests and engine arguments from the folder, and writes its
answers there.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":
    # This Python does not have our package: find it here, and keep this folder off the path, as vidur.py would hide
    # the simulator's own module.
    here = Path(__file__).resolve()
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here.parent]
    sys.modules["blis_replay_labs"] = types.ModuleType("blis_replay_labs")
    sys.modules["blis_replay_labs"].__path__ = [str(here.parents[2])]

from blis_replay_labs.board.adapters import ADAPTERS
from blis_replay_labs.board.adapters.contract import Adapter, AdapterError, Answer, Inputs


def _inputs(folder: Path) -> Inputs:
    with (folder / "requests.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    blocks = [[int(key) for key in row.pop("prefix_blocks", "").split()] for row in rows]
    requests = [{name: int(value) for name, value in row.items()} for row in rows]
    return Inputs(folder, requests, blocks, json.loads((folder / "engine.json").read_text("utf-8")))


def _write(adapter: Adapter, option: str, folder: Path, answers: Iterable[Answer]) -> None:
    with (folder / "results.csv").open("w", encoding="utf-8") as file:
        file.write("request_index,ttft_us,e2e_us,scheduled_us\n")
        for index, ttft_us, e2e_us, scheduled_us in answers:
            at = "" if scheduled_us is None else f"{min(max(scheduled_us, 0.0), ttft_us):.1f}"
            file.write(f"{index},{ttft_us:.1f},{e2e_us:.1f},{at}\n")
    version = importlib.metadata.version(adapter.package) if adapter.package else adapter.tried
    variant = [option] if option and option == adapter.fitted else []  # any other option is a path
    header = {"name": " ".join([adapter.name, *variant]), "version": version, "not_modelled": list(adapter.lacks)}
    (folder / "simulator.json").write_text(json.dumps(header), "utf-8")


def main(words: Sequence[str]) -> int:
    """Run an adapter on a folder; the exit code, and one line on standard error if it is not 0."""
    name, option, folder = words[0], words[1] if len(words) > 2 else "", Path(words[-1])
    adapter = ADAPTERS[name]
    try:
        if adapter.package:
            importlib.metadata.version(adapter.package)
        _write(adapter, option, folder, adapter.run(_inputs(folder), option))
    except importlib.metadata.PackageNotFoundError:
        print(f"{adapter.package} is not installed for {sys.executable}", file=sys.stderr)
        return 1
    except Exception as error:
        kind = "" if isinstance(error, AdapterError) else f"{type(error).__name__}: "
        print(f"{name}: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
