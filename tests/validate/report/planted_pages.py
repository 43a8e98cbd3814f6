"""What the pages of the tests are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import Recording
from blis_replay.replay.release_file import load_release
from blis_replay.validate.experiment import DEFAULT_RELEASE

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"{SCRIPT}\"'><img src=x onerror=alert(1)>{{{{ 7 * 7 }}}}&lt;\x00\x1b[31m\u202e$x^2$"

# Where the hostile recording has it, behind the name of the place.
HOSTILE_PLACES = (
    *("slug", "alias", "model", "hardware", "release", "command"),
    *("file", "kind", "argument", "value", "detail", "delay", "message"),
)


@dataclass(frozen=True)
class PlantedPage:
    """A store with a recording that its server's own engine made; ``wrong`` is 30 ms too long before the queue."""

    store: Path
    recording: Recording
    true: CoefficientRelease
    wrong: CoefficientRelease

    @property
    def slugs(self) -> list[str]:
        """A bundled experiment of which only aggregates are known, and the recording."""
        return [bundled_aliases()["34b-roleplay"], self.recording.slug]

    @property
    def both(self) -> CoefficientRelease:
        """The wrong release, with the coefficients that ship for the bundled one."""
        return replace(self.wrong, models=(*self.wrong.models, *load_release(DEFAULT_RELEASE).models))
