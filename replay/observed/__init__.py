"""Observed quantities in place of modelled ones: cycles, stamps, prefixes.

May import: blis, compiled, ingest, replay.errors.
"""
