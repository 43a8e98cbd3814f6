"""How far a simulator is from a recorded server, and why: the functions that the command line calls.

From Python they are in ``validate/api.py``.

May import: base, blis, fixtures, ingest, recorder, replay.
"""
