"""Requests made up from a description: arrival processes, lengths, shared prefixes, conversations."""
