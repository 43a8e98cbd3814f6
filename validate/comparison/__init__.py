"""Two sides beside each other: a recording and its replay, or any two of them.

May import: blis, compiled, fixtures, ingest, replay, strict, validate.errors, validate.experiment,
validate.judgement, validate.metrics, validate.schedule, validate.text.
"""
