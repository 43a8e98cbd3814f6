"""What load generators leave behind.

May import: base, ingest.readers.documents, ingest.readers.files, ingest.readers.records, ingest.readers.requests,
ingest.recording.
"""
