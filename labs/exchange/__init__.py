"""Files of other tools: requests for other simulators, BLIS's ``defaults.yaml``, and artifacts of StepML.

Plugs in the verb ``export``, and ``import-stepml``, ``import-defaults`` and ``export-defaults`` of ``coefficients``.
"""
