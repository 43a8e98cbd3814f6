"""Which part of the simulator an error comes from: segments and counterfactuals."""
