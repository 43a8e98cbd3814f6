"""Step times from measured operators: a latency model, its releases, and fits to recordings.

Plugs in the latency kind ``operators``, ``coefficients make --operators``, and
``calibrate --operators``.
"""
