"""Simulators of other people: a module each, with what it gets of a replay and what it cannot be given.

Their own Python runs them (``run.py``), so a module imports only this folder, the standard library, and what its
simulator needs.
"""

from blis_replay_labs.board.adapters.aiconfigurator import AICONFIGURATOR
from blis_replay_labs.board.adapters.dynamo import DYNAMO
from blis_replay_labs.board.adapters.llmservingsim import LLMSERVINGSIM
from blis_replay_labs.board.adapters.vidur import VIDUR

ADAPTERS = {adapter.name: adapter for adapter in (DYNAMO, AICONFIGURATOR, VIDUR, LLMSERVINGSIM)}
