"""Do coefficients transfer to models and workloads that they were not fitted to?  Plugs in the verb ``study``."""
