"""Whether a coefficient release may replace another.

May import: blis, compiled, ingest, replay, strict, validate.comparison, validate.errors, validate.experiment,
validate.judgement, validate.metrics, validate.text.
"""
