"""The command line: one file a verb, each a thin shell over a function.

May import: blis, compiled, fixtures, ingest, replay, validate.
"""
