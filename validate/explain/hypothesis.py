"""A hypothesis: one thing that may be wrong in a replay, with the change that puts it right, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from shlex import quote
from typing import Any

import numpy as np
import polars as pl

from blis_replay.blis.latency.models import CorrectedModel, Latency
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.prefix import prefix_identity, prompt_tokens
from blis_replay.replay.schedule.recorded import RecordedSchedule
from blis_replay.validate.explain.trial import Trial, trial_of
from blis_replay.validate.metrics.observed import overloaded

SCHEDULE = "schedule"  # the check that compares the engine's schedule with the recorded one, step by step
# Fields of a mode that choose between the model of a part and its recording; all others are inputs.
_MODELLED = {"pre_queue", "schedule", "output_processing"}


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may be wrong in a replay.

    ``name``: of the component.  ``why``: half a sentence that explains an error that it makes; ``less``: the same where
    it makes times shorter, if that is another one.  ``remedy``: what to do about it; ``command``: what does it.
    ``basis``: what the change rests on.  ``decides``: the measurement that would tell it from others; ``also``: others
    that explain the error equally well.  ``proved_by``: the check that can prove the replay right in this
    (``SCHEDULE``).

    The change is in these.  ``mode``: fields of the replay mode.  ``engine``: engine arguments.  ``warm``: whether the
    prefix cache has all prompts before the first request.  ``latency``: a step-time model.  ``lifecycle``: delays.
    ``schedule``: the recorded schedule read in another way, which only the schedule check can replay.
    """

    name: str
    why: str
    remedy: str
    basis: str = ""
    decides: str = ""
    less: str = ""
    also: tuple[str, ...] = ()
    proved_by: str = ""
    mode: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, int | bool | str] = field(default_factory=dict)
    warm: bool = False
    latency: Latency | CorrectedModel | None = None
    lifecycle: Mapping[str, Any] = field(default_factory=dict)
    schedule: RecordedSchedule | None = field(default=None, repr=False)
    command: str = ""

    @property
    def advice(self) -> str:
        """The remedy with its command."""
        return f"{self.remedy}: {self.command}" if self.command else self.remedy

    @property
    def is_input(self) -> bool:
        """Whether the simulator is given it, rather than models it."""
        return self.warm or bool(self.engine) or bool(self.mode.keys() - _MODELLED)

    @property
    def is_engine_only(self) -> bool:
        """Whether it changes engine arguments and nothing else."""
        return bool(self.engine) and not (self.mode or self.warm or self.latency or self.lifecycle or self.schedule)

    def put_right(
        self, recording: Recording, mode: ReplayMode, entry: ModelEntry
    ) -> tuple[Recording, ReplayMode, ModelEntry]:
        """Recording, mode and coefficients of a replay with every change of this hypothesis except ``schedule``."""
        latency = entry.latency if self.latency is None else self.latency
        changed = replace(entry, latency=latency, lifecycle=replace(entry.lifecycle, **self.lifecycle))
        return self.of(recording), replace(mode, **self.mode), changed

    def of(self, recording: Recording) -> Recording:
        """The recording with the engine arguments and the prefix cache of this hypothesis."""
        changed = with_engine(recording, self.engine, "recorded") if self.engine else recording
        return with_warm_cache(changed) if self.warm else changed


def with_warm_cache(recording: Recording) -> Recording:
    """The recording as if every whole block of every prompt had been cached, as after a load of the same prompts.

    It is returned as it is where hits were counted, or no prompt is known.
    """
    identity = prefix_identity(recording)
    if identity is None or not recording.requests["cached_prompt_tokens"].null_count():
        return recording
    keys, prompts = identity[0], prompt_tokens(recording)
    blocks = np.minimum(keys.count, np.maximum(prompts - 1, 0) // keys.block_size)
    cached = pl.Series("cached_prompt_tokens", blocks * keys.block_size, pl.Int64)
    return replace(recording, requests=rows_of(recording.requests.frame().with_columns(cached)))


@dataclass(frozen=True)
class Replayed:
    """What a replay is made of: the recording's requests and engine, the mode, the coefficients.

    ``release``: where the coefficients ``entry`` are from.  ``options``: of the command line that made it, repeated in
    the commands that are printed.
    """

    recording: Recording
    mode: ReplayMode
    entry: ModelEntry
    release: CoefficientRelease
    options: str = ""

    def put_right(self, hypotheses: Iterable[Hypothesis]) -> Replayed:
        """The same replay with the changes of these hypotheses."""
        recording, mode, entry = self.recording, self.mode, self.entry
        for one in hypotheses:
            recording, mode, entry = one.put_right(recording, mode, entry)
        return replace(self, recording=recording, mode=mode, entry=entry)

    @cached_property
    def trial(self) -> Trial | None:
        """As ``trial_of``."""
        return trial_of(self.recording, self.mode, self.entry)

    def run(self) -> ReplayRun:
        """Replay it.  Raises what ``replay`` raises."""
        return replay(self.recording, replace(self.release, models=(self.entry,)), self.mode)

    def follow_up(self, verb: str) -> str:
        """``blis-replay VERB`` on this recording, with the options that were given."""
        return f"blis-replay {verb} --experiment {quote(self.recording.alias)}{self.options}"

    def calibrate(self, verb: str) -> tuple[str, str]:
        """Remedy and command for coefficients: fit them, or where that is done or impossible, ``verb`` to see why."""
        if overloaded(self.recording.findings):
            return "calibrate to a load that the server keeps up with; of this one see", self.follow_up(verb)
        fit = self.entry.fit
        if fit is not None and any(score.experiment == self.recording.slug for score in fit.scores):
            return "the coefficients are fitted to this recording; see what is left", self.follow_up(verb)
        _, store_option, store = self.options.partition(" --store ")  # calibrate takes no coefficients
        train = f"blis-replay calibrate --train {quote(self.recording.alias)}{store_option}{store}"
        return "calibrate", f"{train} --out mine.yaml"
