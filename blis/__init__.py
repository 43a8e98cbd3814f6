"""The simulator: scheduler, latency models, coefficient releases.  Knows no recordings.

May import: base.
"""
