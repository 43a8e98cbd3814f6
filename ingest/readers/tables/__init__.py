"""Tables of requests, a row each: any table of a user's own, and BLIS's TraceV2.

May import: base, ingest.readers.documents, ingest.readers.files, ingest.readers.records, ingest.readers.requests,
ingest.recording.
"""
