"""A live OTLP receiver: spans arrive over gRPC or HTTP and lie on disk before they are acknowledged.

May import: ingest.errors, ingest.readers.documents.
"""
