"""Readers of recorded files, one module a format; ``ingest.assemble`` joins what they return."""
