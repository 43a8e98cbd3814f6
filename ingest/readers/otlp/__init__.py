"""OpenTelemetry traces: step records, journeys and request spans, in every framing.

May import: base, ingest.readers.documents, ingest.readers.files, ingest.readers.records, ingest.readers.requests,
ingest.readers.server, ingest.recording, ingest.rows, ingest.scan, ingest.scratch.
"""
