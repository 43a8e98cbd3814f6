"""Answers as text for a terminal.

May import: ingest, validate.judgement, validate.metrics.
"""
