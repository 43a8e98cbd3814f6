"""The command line: each verb is a thin shell over a function, and verbs of one subject share a file.

May import: base, blis, fixtures, ingest, replay, validate.
"""
