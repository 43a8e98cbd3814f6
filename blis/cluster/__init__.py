"""Several instances behind a router: the cluster layer above the engine.

May import: base, blis.errors, blis.kernel, blis.latency, blis.result, blis.setup, blis.trace.
"""
