"""Groups of KV blocks by what is said of a model's layers."""

from __future__ import annotations

import re

from blis_replay.base.errors import TraceError
from blis_replay.blis.trace import KvCacheGroup

# As the recorder writes them, and as an engine file may: "window 512 x5, full".
_GROUP = re.compile(r"(full|window|chunk)(?: (\d{1,9}))?(?: x ?(\d{1,2}))?")


def groups_of(said: str) -> tuple[KvCacheGroup, ...] | None:
    """The groups that a text like ``window 512 x5, full`` names, in vLLM's order; None if it is not of that form."""
    groups: list[KvCacheGroup] = []
    for part in said.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            return None
        try:
            groups += [KvCacheGroup(match[1], int(match[2] or 0))] * int(match[3] or 1)  # type: ignore[arg-type]
        except TraceError:
            return None
    return tuple(groups)
