"""Whether a coefficient release may replace another.

May import: base, blis, ingest, replay, validate.comparison, validate.experiment, validate.judgement, validate.metrics,
validate.text.
"""
