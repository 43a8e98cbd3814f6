"""A live OTLP receiver: spans arrive over gRPC or HTTP and lie on disk before they are acknowledged.

May import: compiled, ingest.errors, ingest.frames, ingest.readers.documents.
"""
