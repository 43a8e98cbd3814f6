"""Recorded schedules of the real vLLM scheduler: compare the engine with them, and keep them as digests.

    python scripts/recorded_schedules.py compare DIR...            # scenario directories
    python scripts/recorded_schedules.py keep RECORDED_DIR...      # what vllm_oracle.py random and named recorded
    python scripts/recorded_schedules.py table                     # releases, workloads, equal, causes (Markdown)

``compare`` prints a line per scenario: equal, or the first difference.  Exit code 0 if all are equal, 1 if one differs,
3 if one cannot be read.  ``keep`` writes twelve digits a workload into tests/blis/digests.  A digest stands for all
that `scenario.py` compares; the workload itself is made again from its name.  What a release is known to do
otherwise (`differs` of its pack) is left out.  ``table`` counts the digests; tests/blis/test_release_digests.py sees
that all are equal but those that the packs call unequal.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from scenario import digest_of, first_difference, read_scenario, recorded_schedule

from blis_replay.base.engine_packs import choose_pack, engine_packs
from blis_replay.base.errors import RecordingError, SimulatorError

FOLDER = Path(__file__).parents[1] / "tests" / "blis" / "digests"


def compare(directory: Path) -> int:
    """Print how the engine compares with one scenario; its exit code."""
    try:
        difference = first_difference(read_scenario(directory))
    except RecordingError as error:
        print(f"{directory.name}: {error}")
        return 3
    except SimulatorError as error:
        difference = f"the engine refuses it: {error}"
    print(f"{directory.name}: {'equal' if difference is None else difference}")
    return 0 if difference is None else 1


def keep(folders: list[str]) -> int:
    """Add the scenarios of all folders to the files of their releases; those known already are replaced."""
    found: dict[str, dict[str, str]] = {}
    for folder in map(Path, folders):
        for directory in sorted(path.parent for path in folder.glob("*/config.json")):
            scenario = read_scenario(directory)
            given = vars(scenario.engine) | {"speculative_config": str(scenario.engine.speculation)}
            if choose_pack(scenario.release).pack.not_simulated(given):
                continue
            found.setdefault(scenario.release, {})[scenario.name] = digest_of(recorded_schedule(scenario))
    FOLDER.mkdir(exist_ok=True)
    for release, digests in found.items():
        path = FOLDER / f"{release}.json"
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(dict(sorted((known | digests).items())), indent=0) + "\n", "utf-8")
        print(f"{release}: {len(known | digests)} workloads")
    return 0


def table() -> str:
    """The releases with their workloads, how many are unequal, and why: a Markdown table."""
    rows: dict[tuple[str, ...], dict[str, int]] = {}
    for pack in engine_packs():
        for release in pack.compared:
            kept = json.loads((FOLDER / f"{release}.json").read_text("utf-8"))
            causes = [why for name, why in pack.unequal.items() if name.split()[0] == release]
            why = "; ".join(f"{count} {cause}" for cause, count in Counter(causes).items())
            drafting = sum(name.startswith("draft") for name in kept)
            grouped = sum(name.startswith(("groups", "states")) for name in kept)
            others = sum(name.startswith(("offload", "remote", "producer")) for name in kept) + grouped
            row = (str(len(kept) - others), str(drafting), str(grouped > 0), str(len(causes) or "none"), why)
            rows.setdefault(row, {})[release] = grouped
    lines = [
        f"| {', '.join(releases)} | {row[0]} | {row[1]} | {min(releases.values())} | {row[3]} | {row[4]} |"
        for row, releases in rows.items()
    ]
    head = ["| releases | workloads each | speculating | and with KV-cache groups, at least | unequal | and why |"]
    head.append("|---|---|---|---|---|---|")
    return "\n".join([*head, *lines])


def main(arguments: list[str]) -> int:
    """Compare every directory (the worst of their exit codes), keep what is in the folders, or print the table."""
    match arguments:
        case ["compare", _, *_]:
            return max(compare(Path(argument)) for argument in arguments[1:])
        case ["keep", _, *_]:
            return keep(arguments[1:])
        case ["table"]:
            print(table())
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
