"""Why a simulator is off: hypotheses as data, one trial that scores them, and the share of the error of each.

May import: blis, compiled, ingest, replay, strict, validate.fit, validate.errors,
validate.metrics, validate.text.
"""
