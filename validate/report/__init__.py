"""One self-contained HTML page: what a replay is worth, with the evidence.

May import: base, blis, ingest, replay, validate.comparison, validate.experiment, validate.explain, validate.history,
validate.judgement, validate.metrics, validate.text.
"""
