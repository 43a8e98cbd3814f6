"""Published arrival traces without latencies.

May import: ingest.readers.documents, ingest.readers.files, ingest.readers.records, ingest.readers.requests,
ingest.rows.
"""
