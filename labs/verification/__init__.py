"""Checks of the simulator itself: what must hold for every run, and what theory says about it.

Plugs in the verb ``verify``, which also asks the lab ``planted``.
"""
