"""Instrument checks: what a recording says about its own instruments, as findings.

May import: base, ingest.overload, ingest.recording, ingest.rows, ingest.scratch, ingest.served, ingest.steps,
ingest.store, ingest.stream, ingest.tables.
"""
