"""Compiled scans of large recordings: what matters goes straight into arrays, anything unusual to a decoder.

May import: base.
"""
