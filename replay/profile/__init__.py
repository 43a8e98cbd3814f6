"""Requests generated from a load profile instead of the recorded ones.

May import: blis, compiled, ingest, replay.errors, replay.observed.
"""
