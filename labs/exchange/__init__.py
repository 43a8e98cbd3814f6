"""Files of other tools: requests for other simulators, and BLIS's ``defaults.yaml``.

Plugs in the verb ``export``, and ``coefficients convert``.
"""
