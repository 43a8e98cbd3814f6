"""Files of other tools: requests for other simulators, and BLIS's ``defaults.yaml``.

Plugs in ``blis-replay simulate --to``, and ``coefficients convert``.
"""
