"""Compiled scans of large JSON recordings: what matters goes straight into arrays, anything unusual to a decoder."""
