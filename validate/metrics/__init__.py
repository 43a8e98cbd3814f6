"""What is measured: latencies, their statistics, and how sure they are.

May import: base, ingest, replay.
"""
