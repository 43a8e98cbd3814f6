"""Coefficient releases: files of coefficients with what they were fitted on.

May import: base, blis.kernel, blis.latency, blis.result.
"""
