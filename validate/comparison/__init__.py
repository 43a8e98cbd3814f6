"""Two sides beside each other: a recording and its replay, or any two of them.

May import: base, blis, fixtures, ingest, replay, validate.experiment, validate.judgement, validate.metrics,
validate.run_mark, validate.schedule, validate.text.
"""
