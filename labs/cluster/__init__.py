"""Several instances behind a router: the cluster layer above the engine."""
