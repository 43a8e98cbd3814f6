"""Errors of a simulated run against a recorded one, calibration, and the command line."""
