"""Coefficients fitted to recordings: their confidence, and their scores on what was held out.

May import: blis, compiled, ingest, replay, validate.errors, validate.experiment,
validate.metrics, validate.text.
"""
