"""Step times from measured operators and from the roofline: latency models, their releases, and fits to recordings.

Plugs in the latency kinds ``operators`` and ``roofline``, ``silicon`` and ``roofline`` of ``coefficients``, and
``calibrate --operators``.
"""
