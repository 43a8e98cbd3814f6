"""Coefficient releases: files of coefficients with what they were fitted on.

May import: blis.errors, blis.kernel, blis.latency, blis.result, compiled, strict.
"""
