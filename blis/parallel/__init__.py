"""Data parallelism: several instances of one engine in one compiled loop, and vLLM's own balancer of ranks.

May import: base, blis.kernel, blis.latency, blis.result, blis.setup, blis.trace.
"""
