"""Why a simulator is off: hypotheses as data, one trial that scores them, and the share of the error of each.

May import: base, blis, ingest, replay, validate.fit, validate.metrics, validate.text.
"""
