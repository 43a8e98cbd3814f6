"""MLPerf's audited runs as ground truth: what LoadGen measured, beside what the simulator predicts of it.

Plugs in the verb ``study mlperf``.
"""
