"""Request records of tools that no server is judged by: arrival traces, older and other simulators, summaries.

Plugs in formats of ``ingest``.
"""
