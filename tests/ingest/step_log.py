"""What really happened in ``data/live-vllm-0.32``: requests by ``steplog.jsonl.gz``, from inside of the engine core."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class LoggedRequest:
    """A request as the scheduler had it: us of the host's monotonic clock.

    ``token_us``: when ``update_from_output()`` had processed each output token.
    """

    arrived_us: float
    prompt_tokens: int
    computed_tokens: int = 0
    token_us: list[float] = field(default_factory=list)


def step_log_requests(path: Path) -> list[LoggedRequest]:
    """All requests in order of arrival; a step that reaches the end of the prompt computes an output token."""
    requests: dict[str, LoggedRequest] = {}
    scheduled: dict[int, dict[str, int]] = {}
    with gzip.open(path, "rt") as stream:
        for line in map(json.loads, stream):
            if line["e"] == "a":
                requests[line["r"]] = LoggedRequest(line["t"] / 1e3, line["p"])
            elif line["e"] == "s":
                scheduled[line["i"]] = line["n"]
                for name, cached in line["new"].items():
                    requests[name].computed_tokens = cached
            else:
                for name, tokens in scheduled.pop(line["i"]).items():
                    request = requests[name]
                    request.computed_tokens += tokens
                    if request.computed_tokens >= request.prompt_tokens:
                        request.token_us.append(line["t1"] / 1e3)
    return list(requests.values())
