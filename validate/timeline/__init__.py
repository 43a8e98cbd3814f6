"""A window of a run, observed and simulated on one clock, for trace viewers.

May import: base, blis, ingest, replay, validate.comparison, validate.metrics, validate.text.
"""
