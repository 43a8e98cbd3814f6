"""What a recording holds, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from blis_replay.ingest.recording import Finding, Recording, SharedPrefix
from blis_replay.ingest.store import KvEventCount
from blis_replay.validate.check_text import finding_line
from blis_replay.validate.terminal import cut_table, toned, wrap

_SHORT_HASH = 12


def inspection_json(
    recording: Recording, findings: Sequence[Finding], cache: Sequence[KvEventCount] = ()
) -> dict[str, object]:
    """The recording's identity, engine arguments with sources, files, gaps, cache evidence and findings."""
    prefix = recording.prefix
    return {
        "slug": recording.slug,
        "alias": recording.alias,
        "model": recording.model,
        "hardware": recording.hardware,
        "tensor_parallelism": recording.tensor_parallelism,
        "workload": recording.workload,
        "ground_truth": recording.ground_truth,
        "content_hash": recording.content_hash,
        "requests": recording.requests.height,
        "steps": recording.steps.height,
        "engine": {name: vars(setting) for name, setting in sorted(recording.engine.items())},
        "stages": [vars(stage) for stage in recording.stages],
        "shared_prefix": recording.shared_prefix and vars(recording.shared_prefix),
        "load_profile": recording.load_profile and asdict(recording.load_profile),
        "clocks": [vars(clock) for clock in recording.clocks],
        "files": [vars(file) for file in recording.files],
        "missing": list(recording.missing),
        "prefix_identity": prefix
        and {"source": prefix.source, "requests": prefix.requests.height, "prompts": prefix.prompts.height},
        "kv_events": [vars(count) for count in cache],
        "findings": [vars(finding) for finding in findings],
    }


def findings_frame(findings: Sequence[Finding]) -> pl.DataFrame:
    """What the instrument checks found, a row each: ``check, severity, metric, message, threshold``."""
    columns = ("check", "severity", "metric", "message", "threshold")
    rows = [[getattr(finding, name) for name in columns] for finding in findings]
    return pl.DataFrame(rows, orient="row", schema=dict.fromkeys(columns, pl.String))


def inspection_text(recording: Recording, findings: Sequence[Finding], cache: Sequence[KvEventCount] = ()) -> str:
    """The same for a terminal, in 80 columns."""
    statuses = recording.requests["status"].value_counts(sort=True).iter_rows()
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses)
    lines = [
        f"{toned(recording.alias, 'heading')}  ({recording.slug})",
        f"  model: {recording.model or 'not recorded'}",
        f"  tensor parallelism: {recording.tensor_parallelism or 'not recorded'}",
        f"  hardware: {recording.hardware or 'not recorded'}",
        f"  ground truth: {recording.ground_truth}",
        f"  requests: {recording.requests.height:,} ({counts or 'none'})",
        f"  step records: {recording.steps.height:,}",
    ]
    if recording.prefix is not None:
        prompts = f"{recording.prefix.prompts.height:,} prompts"
        lines.append(wrap(f"  prefix identity: {prompts} ({recording.prefix.source})", "    "))
    lines += [f"  stage {s.stage}: {s.rate_per_s:g} requests/s for {s.duration_us / 1e6:g} s" for s in recording.stages]
    lines += [wrap(line, "    ") for line in _load(recording)]
    engine = [
        [name, str(setting.value), setting.source, setting.detail] for name, setting in sorted(recording.engine.items())
    ]
    parts = ["\n".join(lines), cut_table(["engine argument", "value", "source", ""], engine, left=4)]
    files = [
        [f.name, f.kind, f"{f.bytes:,}", f"{f.records:,}", f"{f.rejected_count:,}", f.sha256[:_SHORT_HASH]]
        for f in recording.files
    ]
    parts.append(cut_table(["file", "kind", "bytes", "records", "rejected", "sha256"], files, left=2, wide=(5,)))
    if cache:
        parts.append(
            cut_table(["KV-cache event", "medium", "events", "blocks", "tokens", "failed"], _cache(cache), left=2)
        )
    if recording.missing:
        parts.append(
            toned("not in the recording:", "heading")
            + "\n"
            + "\n".join(wrap(f"- {line}") for line in recording.missing)
        )
    parts.append("\n".join([toned("instrument checks:", "heading"), *map(finding_line, findings)]))
    return "\n\n".join(parts)


def _load(recording: Recording) -> list[str]:
    """The prompts that ran, and the load as it was declared."""
    lines, declared = [], recording.load_profile
    if recording.shared_prefix is not None:
        lines.append(f"  shared prefixes: {_prompts(recording.shared_prefix)}")
    if declared is not None:
        said = [f"{declared.arrivals} arrivals"] if declared.arrivals else []
        said += [_prompts(declared.shared_prefix)] if declared.shared_prefix else []
        said += ["conversations of several turns"] if declared.multi_turn else []
        lines.append(f"  declared in {declared.source}: {'; '.join(said) or 'load stages'}")
    return lines


def _prompts(workload: SharedPrefix) -> str:
    return (
        f"{workload.num_groups} groups of {workload.num_prompts_per_group} prompts, "
        f"{workload.system_prompt_tokens} + {workload.question_tokens} tokens"
    )


def _cache(counts: Sequence[KvEventCount]) -> list[list[str]]:
    return [
        [
            count.event,
            " to ".join(medium for medium in (count.medium, count.target_medium) if medium) or "-",
            *("-" if n is None else f"{n:,}" for n in (count.events, count.blocks, count.tokens, count.failed)),
        ]
        for count in counts
    ]
