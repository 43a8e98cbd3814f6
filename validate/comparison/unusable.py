"""Which numbers of a comparison must not be used, because an instrument check says so."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.ingest.recording import Finding
from blis_replay.validate.metrics import STATISTICS

# Metric of a finding -> the metrics that are computed from it: a gap between tokens is
# (E2E - TTFT) / (output tokens - 1) where no token times were recorded.
_SPOILS = {
    "e2e": ("e2e", "tpot", "itl"),
    "ttft": ("ttft", "tpot", "itl"),
    "itl": ("itl",),
    "output_tokens": ("tpot", "itl"),
}
_QUANTILES = tuple(name for name in STATISTICS if name != "mean")


def unusable_cells(findings: Sequence[Finding], *, token_times: bool) -> dict[tuple[str, str], Finding]:
    """``(metric, statistic)`` of each number that must not be used, with the first finding that says so.

    ``token_times``: whether the ITL comes from recorded token times, and so depends on no other metric.
    """
    unusable: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        if finding.severity != "unusable":
            continue
        for metric, statistic in _spoiled(finding.metric, token_times):
            unusable.setdefault((metric, statistic), finding)
    return unusable


def _spoiled(metric: str, token_times: bool) -> list[tuple[str, str]]:
    if metric == "itl quantiles":  # the mean does not need single gaps
        return [("itl", name) for name in _QUANTILES]
    spoiled = _SPOILS.get(metric, ())
    if token_times and metric != "itl":
        spoiled = tuple(name for name in spoiled if name != "itl")
    return [(name, statistic) for name in spoiled for statistic in STATISTICS]
