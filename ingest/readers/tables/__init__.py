"""Tables of requests, a row each: any table of a user's own, our own export, and tools whose files are no more.

May import: base, ingest.errors, ingest.readers.documents, ingest.readers.files, ingest.readers.records,
ingest.readers.requests, ingest.readers.server.engine_arguments, ingest.recording, ingest.rows.
"""
