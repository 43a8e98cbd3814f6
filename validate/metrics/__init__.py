"""What is measured: latencies, their statistics, and how sure they are.

May import: compiled, ingest, replay.
"""
