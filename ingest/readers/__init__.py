"""Readers of recorded files, one module a format; ``ingest.assemble`` joins what they return.

May import: ingest.errors, ingest.prompt_tree, ingest.recording, ingest.rows, strict.
"""
