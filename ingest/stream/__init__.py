"""Token events: how a client stamped its stream, and how many tokens a request had.

May import: compiled, ingest.queries, ingest.recording, ingest.rows.
"""
