"""Which part of the simulator an error comes from: segments and counterfactuals.

May import: blis, compiled, ingest, replay, validate.calibration, validate.comparison, validate.errors,
validate.metrics, validate.text.
"""
