"""Whether it matters how a step with prefill and decode tokens takes its time from one with either."""
