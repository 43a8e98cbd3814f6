"""A hypothesis: one thing that may be wrong in a replay, with the change that puts it right, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import polars as pl

from blis_replay.blis.latency.models import Latency, ObservedCycles
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.checks import stationarity
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.prefix import prefix_identity, prompt_tokens
from blis_replay.replay.schedule.recorded import RecordedSchedule
from blis_replay.replay.warm_up import Stalls
from blis_replay.validate.fit.evidence import is_load_level
from blis_replay.validate.fit.refused import why_not_fitted
from blis_replay.validate.metrics.observed import overloaded

PROVED_RIGHT, PROVED_WRONG, OPEN = "proved right", "proved wrong", "open"
# Fields of a mode that choose between the model of a part and its recording; all others are inputs.
_MODELLED = {"pre_queue", "schedule", "output_processing", "pace"}


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may be wrong in a replay.

    ``name``: of the component.  ``why``: half a sentence that explains its error; ``less``: the same where times get
    shorter, if that differs.  ``remedy``: what to do; ``command``: what does it.  ``basis``: the evidence;
    ``recorded``: whether that is a record of the server.  ``decides``: the measurement that would prove it; ``also``:
    other hypotheses that explain the error equally well.

    The other fields are the change.  ``mode``: fields of the replay mode.  ``engine``: engine arguments.  ``warm``:
    all prompts are in the prefix cache before the first request.  ``latency``: a step-time model.  ``lifecycle``:
    delays.  ``stalls``: when the server stood still.  ``schedule``: the recorded schedule read in another way, which
    only the schedule check can replay.
    """

    name: str
    why: str
    remedy: str
    basis: str = ""
    decides: str = ""
    less: str = ""
    also: tuple[str, ...] = ()
    recorded: bool = False
    mode: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, int | bool | str] = field(default_factory=dict)
    warm: bool = False
    latency: Latency | None = None
    lifecycle: Mapping[str, Any] = field(default_factory=dict)
    stalls: Stalls | None = field(default=None, repr=False)
    schedule: RecordedSchedule | None = field(default=None, repr=False)
    command: str = ""

    @property
    def advice(self) -> str:
        """The remedy with its command."""
        return f"{self.remedy}: {self.command}" if self.command else self.remedy

    @property
    def is_input(self) -> bool:
        """Whether the simulator is given it, rather than models it."""
        return self.warm or self.stalls is not None or bool(self.engine) or bool(self.mode.keys() - _MODELLED)

    @property
    def is_engine_only(self) -> bool:
        """Whether it changes engine arguments and nothing else."""
        return bool(self.engine) and not (self.mode or self.warm or self.latency or self.lifecycle or self.schedule)


@dataclass(frozen=True)
class Standing:
    """What the recording proves of one thing that may be wrong in a replay.

    ``state``: PROVED_RIGHT or PROVED_WRONG by a record of the server, or OPEN.  ``because``: half a sentence.
    ``decides``: the measurement that would decide what is open, where one is known.
    """

    name: str
    state: str
    because: str
    decides: str = ""


@dataclass(frozen=True)
class Replayed:
    """What a replay is made of: the recording's requests and engine, the mode, the coefficients.

    ``release``: where the coefficients ``entry`` are from.  ``options``: of the command line, for printed commands.
    ``window``: the share of the run whose requests are compared.  ``stalls``: when the server stands still.
    """

    recording: Recording
    mode: ReplayMode
    entry: ModelEntry
    release: CoefficientRelease
    options: str = ""
    window: tuple[float, float] = (0.0, 1.0)
    stalls: Stalls | None = None

    def put_right(self, hypotheses: Iterable[Hypothesis]) -> Replayed:
        """The same replay with the changes of these hypotheses, except another schedule."""
        changed = self
        for one in hypotheses:
            recording, entry = changed.recording, changed.entry
            if one.engine:
                recording = with_engine(recording, one.engine, "recorded")
            changed = replace(
                changed,
                recording=_with_warm_cache(recording) if one.warm else recording,
                mode=replace(changed.mode, **one.mode),
                entry=replace(
                    entry, latency=one.latency or entry.latency, lifecycle=replace(entry.lifecycle, **one.lifecycle)
                ),
                stalls=one.stalls or changed.stalls,
            )
        return changed

    @property
    def entry_with_stalls(self) -> ModelEntry:
        """The coefficients of a server that stands still at the known times."""
        latency, stalls = self.entry.latency, self.stalls
        if stalls is None:
            return self.entry
        still = stalled(latency, stalls) if isinstance(latency, ObservedCycles) else stalls.on(latency)
        return replace(self.entry, latency=still)

    def run(self) -> ReplayRun:
        """Replay it.  Raises what ``replay`` raises."""
        return replay(self.recording, replace(self.release, models=(self.entry_with_stalls,)), self.mode)

    @property
    def segments(self) -> str:
        """The command that shows where the time of a request goes."""
        return f"{self._follow_up('explain')} --segments"

    def within(self, window: str) -> str:
        """The command that explains the errors of a part of the run, written ``FROM:TO``."""
        return f"{self._follow_up('explain')} --window {window}"

    def _follow_up(self, verb: str) -> str:
        return f"blis-replay {verb} {quote(self.recording.alias)}{self.options}"

    def calibrate(self, verb: str = "") -> tuple[str, str]:
        """Remedy and command for coefficients: fit them; where that is done or impossible, see why.

        ``verb``: what shows it; empty: the segments do.
        """
        recording, fit = self.recording, self.entry.fit
        see = self._follow_up(verb) if verb else self.segments
        if overloaded(recording.findings):
            return "calibrate to a load that the server keeps up with; of this one see", see
        if is_load_level(recording) or why_not_fitted(recording, "auto") is not None:
            return "calibrate to another run of this server; no step times follow from this one, of which see", see
        if self.stalls is not None or stationarity.stood_still(recording.findings):
            return "calibrate to a run in which the server does not stand still; of this one see", see
        if fit is not None and any(score.experiment == recording.slug for score in fit.scores):
            return "the coefficients are fitted to this recording; see what is left", see
        _, store_option, store = self.options.partition(" --store ")  # calibrate takes no coefficients
        train = f"blis-replay calibrate {quote(recording.alias)}{store_option}{store}"
        # Not over the coefficients that are judged, nor over another fit.
        names = chain(("mine.yaml", "refit.yaml"), (f"refit-{n}.yaml" for n in count(2)))
        out = next(name for name in names if name not in self.options and not Path(name).exists())
        return "calibrate, and judge the fit by another run", f"{train} --out {out}"


def stalled(cycles: ObservedCycles, stalls: Stalls, sign: int = 1) -> ObservedCycles:
    """Recorded cycles with the stalls that are theirs; ``sign`` -1: without them."""
    place = np.minimum(np.searchsorted(cycles.from_us, stalls.at_us), len(cycles.from_us) - 1)
    theirs = cycles.from_us[place] == stalls.at_us
    cycle_us = cycles.cycle_us.copy()
    cycle_us[place[theirs]] += sign * stalls.longer_us[theirs]
    return replace(cycles, cycle_us=cycle_us)


def _with_warm_cache(recording: Recording) -> Recording:
    """The recording as if every whole block of every prompt had been cached, as after a load of the same prompts.

    Unchanged where hits were counted, or no prompt is known.
    """
    identity = prefix_identity(recording)
    if identity is None or not recording.requests["cached_prompt_tokens"].null_count():
        return recording
    keys, prompts = identity[0], prompt_tokens(recording)
    blocks = np.minimum(keys.count, np.maximum(prompts - 1, 0) // keys.block_size)
    cached = pl.Series("cached_prompt_tokens", blocks * keys.block_size, pl.Int64)
    return replace(recording, requests=rows_of(recording.requests.frame().with_columns(cached)))
