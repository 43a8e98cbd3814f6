"""How long a step takes: latency models, and the facts about models and GPUs behind them.

May import: base, blis.kernel.
"""
