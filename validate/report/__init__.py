"""One self-contained HTML page: what a replay is worth, with the evidence.

May import: blis, compiled, ingest, replay, validate.attribution, validate.comparison, validate.errors,
validate.experiment, validate.metrics, validate.text.
"""
