"""Requests that a load profile declares, in place of those that were recorded: what an add-on makes of a profile."""

from __future__ import annotations

from typing import Protocol

from blis_replay.base.addons import needed_addon
from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.recording import Recording


class DeclaredRequests(Protocol):
    """Requests of a load profile: int64[n] each, and in words what they rest on.

    Request i stands for request i of the recording, so that a replay can be compared request by request.  The methods
    raise ``ReplayError`` for what the profile does not declare.
    """

    def arrivals(self) -> tuple[Int64s, str]:
        """Arrival times, us."""

    def lengths(self) -> tuple[Int64s, Int64s, str]:
        """Prompt and output tokens."""

    def blocks(self, prompts: Int64s) -> tuple[BlockKeys, str]:
        """Block identities of prompts of these lengths."""


def declared_requests(kind: str, recording: Recording) -> DeclaredRequests:
    """The requests of the recording's load profile as ``kind`` reads it; raises ``ReplayError`` without a profile."""
    if recording.load_profile is None:
        raise ReplayError(
            f"{recording.alias}: no load profile is recorded, so no requests can be generated from it; ingest the "
            "recording with its profile.yaml or results/config.yaml"
        )
    requests_of = needed_addon("requests", kind, f"requests of a load profile ({kind})")
    declared: DeclaredRequests = requests_of(recording, recording.load_profile)
    return declared
