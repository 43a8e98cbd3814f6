"""Faults that are planted in synthetic servers, recordings and simulators, and whether they are found.

Synthetic servers whose truth is known, their recordings and files; the scoreboard ``verify --faults``; and servers of
known coefficients to calibrate to (``verify --calibration``).
"""
