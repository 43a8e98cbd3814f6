"""Tables of requests, a row each: any table of a user's own, and tools whose files are no more than that.

May import: ingest.errors, ingest.readers.documents, ingest.readers.files, ingest.readers.records,
ingest.readers.requests, ingest.readers.server.engine_arguments, ingest.readers.simulators.tracev2, strict.
"""
