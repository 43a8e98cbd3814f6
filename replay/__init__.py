"""The driver: observed requests through the simulator.

May import: blis, compiled, ingest, strict.
"""
