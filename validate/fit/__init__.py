"""Coefficients fitted to recordings: their confidence, and their scores on what was held out.

May import: base, blis, ingest, replay, validate.experiment, validate.metrics, validate.run_mark,
validate.text.
"""
