"""Answers as text for a terminal.

May import: base.errors, ingest, validate.judgement, validate.metrics.
"""
