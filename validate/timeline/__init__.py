"""A window of a run, observed and simulated, for trace viewers."""
