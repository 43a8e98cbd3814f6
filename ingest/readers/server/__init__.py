"""What the server itself says besides traces: its log, its metrics, its clock.

May import: base.errors, ingest.readers.documents, ingest.readers.files, ingest.readers.requests, ingest.recording,
ingest.rows, ingest.scratch, ingest.steps, base.arrays, base.document, base.engine_packs.
"""
