"""Checks of the simulator itself: what must hold for every run, and what theory says about it.

May import: blis.engine, blis.errors, blis.kernel, blis.latency, blis.result, blis.trace, compiled.
"""
