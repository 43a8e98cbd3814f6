"""A live OTLP collector: spans of many exporters, over gRPC and HTTP, on disk before they are acknowledged.

Plugs in the verb ``collect``.
"""
