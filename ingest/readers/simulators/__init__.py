"""Request tables of simulators, and our own.

May import: ingest.errors, ingest.prompt_tree, ingest.readers.documents,
ingest.readers.files, ingest.readers.records, ingest.readers.requests, ingest.recording, ingest.rows.
"""
