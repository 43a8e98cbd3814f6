"""Published arrival traces without latencies."""
