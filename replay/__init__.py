"""The driver: observed requests through the simulator.

May import: base, blis, ingest.
"""
