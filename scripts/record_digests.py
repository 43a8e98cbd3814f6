"""Keep recorded schedules of a release of vLLM as digests, twelve digits a workload, for tests/blis/digests.

    python scripts/record_digests.py RECORDED_DIR...

The directories hold what `scripts/vllm_oracle.py random` and `named` recorded. A digest stands for all that
`fixtures.scenario` compares; the workload itself is made again from its name. What a release is known to do otherwise
(`differs` of its pack) is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blis_replay.fixtures.scenario import digest_of, read_scenario, recorded_schedule
from blis_replay.strict.engine_packs import choose_pack

FOLDER = Path(__file__).parents[1] / "tests" / "blis" / "digests"


def main(folders: list[str]) -> int:
    """Add the scenarios of all folders to the files of their releases; those known already are replaced."""
    if not folders:
        print(__doc__)
        return 2
    found: dict[str, dict[str, str]] = {}
    for folder in map(Path, folders):
        for directory in sorted(path.parent for path in folder.glob("*/config.json")):
            scenario = read_scenario(directory)
            if choose_pack(scenario.release).pack.not_simulated(vars(scenario.engine)):
                continue
            found.setdefault(scenario.release, {})[scenario.name] = digest_of(recorded_schedule(scenario))
    FOLDER.mkdir(exist_ok=True)
    for release, digests in found.items():
        path = FOLDER / f"{release}.json"
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(dict(sorted((known | digests).items())), indent=0) + "\n", "utf-8")
        print(f"{release}: {len(known | digests)} workloads")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
