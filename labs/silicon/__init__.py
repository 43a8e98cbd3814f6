"""Step times from measured operators: a latency model, its releases, and fits to recordings.

Plugs in the latency kind ``operators``, ``silicon`` of ``coefficients``, and
``calibrate --operators``.
"""
