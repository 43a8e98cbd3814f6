"""The schedule as a checksum: a server's steps, recorded one by one, against those of the engine for the same queue.

May import: base, blis, ingest.
"""
