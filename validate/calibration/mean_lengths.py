"""How long the requests of a recording are on average."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.ingest.recording import Recording
from blis_replay.replay.prefix import prompt_tokens


@dataclass(frozen=True)
class MeanLengths:
    """Means over requests: prompt and output tokens, and the context of a decode."""

    prompt_tokens: float
    output_tokens: float
    context_tokens: float


def mean_lengths(recording: Recording) -> MeanLengths:
    """Mean lengths of a recording; long outputs decode in more steps, so they weigh more in the context."""
    known = recording.requests["output_tokens"].is_not_null().to_numpy()
    prompts = prompt_tokens(recording)[known]
    outputs = recording.requests["output_tokens"].drop_nulls().to_numpy().astype(np.float64)
    if not outputs.sum() > 0:
        return MeanLengths(float(prompt_tokens(recording).mean()), 1.0, float(prompt_tokens(recording).mean()))
    context = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
    return MeanLengths(float(prompts.mean()), float(outputs.mean()), context)
