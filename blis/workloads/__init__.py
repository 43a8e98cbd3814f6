"""Requests made up from a description: arrival processes, lengths, shared prefixes, conversations.

May import: blis.errors, blis.trace, compiled, strict.
"""
