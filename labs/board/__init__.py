"""The leaderboard: simulators of other people, and floors, on the same recordings as our engine.

Plugs in simulators (``dynamo``, ``aiconfigurator``, ``vidur``, ``llmservingsim``, ``floor``) and the boards of
``blis-replay compare`` (``--simulators``, ``--published``).
"""
