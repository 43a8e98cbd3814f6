"""Published findings about the simulator, each one a YAML file that can be run again.

Plugs in the verbs ``study`` and ``coefficients generalize``, which asks whether coefficients transfer to what they were
not fitted to.
"""
