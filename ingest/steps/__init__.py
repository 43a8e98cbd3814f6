"""Engine steps: what each one served, when it ran, and what its requests say about it.

May import: compiled, ingest.errors, ingest.recording, ingest.rows.
"""
