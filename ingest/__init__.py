"""Recordings: read from files, checked, and kept in the ground-truth store.

May import: base.
"""
