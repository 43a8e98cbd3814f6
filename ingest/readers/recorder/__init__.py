"""The reader of what the recorder inside a server writes.

May import: ingest.errors, ingest.readers.documents, ingest.readers.files, ingest.readers.otlp, ingest.readers.requests,
ingest.recording, ingest.rows.
"""
