"""The reader of what the recorder inside a server writes.

May import: compiled, ingest.errors, ingest.readers.documents, ingest.readers.files, ingest.readers.otlp,
ingest.readers.requests, ingest.readers.server.clock, ingest.recording, ingest.rows.
"""
