"""Instrument checks: what a recording says about its own instruments, as findings."""
