"""Instrument checks: what a recording says about its own instruments, as findings.

May import: base, ingest.errors, ingest.published, ingest.recording, ingest.rows, ingest.steps, ingest.store,
ingest.stream, ingest.tables.
"""
