"""Engine steps: what each one served, when it ran, and what its requests say about it.

May import: base, ingest.recording, ingest.rows, ingest.scratch.
"""
