"""Simulators of other people: a module each, with what it is told of a replay and what cannot be told.

Their own Python runs them (``run.py``), so a module imports of this package what is in this room alone, and of others
only what its simulator needs.

May import: nothing.
"""

from blis_replay.replay.adapters.aiconfigurator import AICONFIGURATOR
from blis_replay.replay.adapters.dynamo import DYNAMO
from blis_replay.replay.adapters.llmservingsim import LLMSERVINGSIM
from blis_replay.replay.adapters.vidur import VIDUR

ADAPTERS = {adapter.name: adapter for adapter in (DYNAMO, AICONFIGURATOR, VIDUR, LLMSERVINGSIM)}
