"""Compare the engine with recorded schedules of the real vLLM scheduler.

    python scripts/compare_oracle.py DIR...

One line per scenario directory: equal, or the first difference.  Exit code 0 if all are
equal, 1 if one differs, 3 if one cannot be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from blis_replay.blis.errors import SimulatorError
from blis_replay.fixtures.scenario import first_difference, read_scenario
from blis_replay.ingest.errors import RecordingError


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


def main(arguments: list[str]) -> int:
    """Compare every directory named; the worst of their exit codes."""
    if not arguments:
        print(__doc__)
        return 2
    return max(compare(Path(argument)) for argument in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
