"""A recorder inside a vLLM server, loaded by it as a plugin: what every engine step scheduled, and every arrival.

It runs in the server's own environment, so it needs nothing but Python 3.9 and its standard library.

May import: nothing.
"""
