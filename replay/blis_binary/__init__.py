"""BLIS as an external simulator: its files, its binary, what it does otherwise.

May import: blis, compiled, ingest, replay.errors, replay.plan, replay.program, replay.simulator.
"""
