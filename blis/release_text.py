"""A coefficient release as YAML text, the form that ``release.parse_release`` reads."""

from __future__ import annotations

import yaml

from blis_replay.blis.release import SCHEMA, CoefficientRelease, ModelEntry
from blis_replay.blis.release_fit import format_fit
from blis_replay.blis.release_latency import format_latency


def format_release(release: CoefficientRelease) -> str:
    """YAML text of a release; parsing it gives the same release but for ``sha256``."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "name": release.name,
        "status": release.status,
        "summary": release.summary,
        "source": release.source,
        "hardware": release.hardware,
        "fitted_on": [vars(fit) for fit in release.fitted_on],
        "models": [_entry(entry) for entry in release.models],
    }
    if release.published_replay:
        document["published_replay"] = dict(release.published_replay)
    if release.published_errors:
        document["published_errors"] = dict(release.published_errors)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _entry(entry: ModelEntry) -> dict[str, object]:
    fields: dict[str, object] = {"model": entry.model, "tensor_parallelism": entry.tensor_parallelism}
    if entry.dtype:
        fields["dtype"] = entry.dtype
    if entry.applies_to:
        fields["applies_to"] = list(entry.applies_to)
    fields["latency"] = format_latency(entry.latency)
    delays = {
        "pre_queue": f"{entry.lifecycle.pre_queue_us:.10g} us",
        "pre_queue_per_prompt_token": f"{entry.lifecycle.pre_queue_per_prompt_token_us:.10g} us/token",
        "post_token": f"{entry.lifecycle.post_token_us:.10g} us",
        "post_request": f"{entry.lifecycle.post_request_us:.10g} us",
        "scheduling": f"{entry.lifecycle.scheduling_us:.10g} us",
        "preemption": f"{entry.lifecycle.preemption_us:.10g} us",
    }
    if entry.lifecycle.first_token_per_decode_us:
        delays["first_token_per_decode"] = f"{entry.lifecycle.first_token_per_decode_us:.10g} us/token"
    sources = {f"{name}_source": text for name, text in (entry.sources or {}).items()}
    fields["lifecycle"] = {**delays, **sources}
    if entry.fit is not None:
        fields["fit"] = format_fit(entry.fit)
    return fields
