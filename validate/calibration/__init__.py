"""Coefficients from recordings, how sure they are, and what they score on what they never saw."""
