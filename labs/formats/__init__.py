"""Request records of tools that no server is judged by: arrival traces, older and other simulators, load levels.

Plugs in formats of ``ingest``.
"""
