"""Many replays on one machine or several.

May import: replay.errors.
"""
