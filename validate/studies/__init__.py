"""Published findings about the simulator, each one a YAML file that can be run again.

May import: blis, compiled, ingest, replay, strict, validate.calibration, validate.errors, validate.metrics,
validate.text.
"""
