"""Step times from measured operators and from datasheets: how they are fitted to recordings.

Plugs in ``calibrate --operators``.
"""
