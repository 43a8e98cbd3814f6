"""What the pages of the tests are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.recording import Recording

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"{SCRIPT}\"'><img src=x onerror=alert(1)>{{{{ 7 * 7 }}}}&lt;\x00\x1b[31m\u202e$x^2$"

# Where the hostile recording has it, behind the name of the place.
HOSTILE_PLACES = (
    *("slug", "alias", "model", "hardware", "release", "command"),
    *("file", "kind", "argument", "value", "detail", "delay", "measured", "message", "threshold"),
)


@dataclass(frozen=True)
class PlantedPage:
    """A store with a recording that its server's own engine made; ``wrong`` is 30 ms too long before the queue."""

    store: Path
    recording: Recording
    true: CoefficientRelease
    wrong: CoefficientRelease
