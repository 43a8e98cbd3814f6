"""Published findings about the simulator, each one a YAML file that can be run again.

Plugs in the verb ``study``.
"""
