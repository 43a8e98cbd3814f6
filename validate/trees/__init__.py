"""Whether gradient-boosted trees carry step times to a model or a workload that they have not seen."""
