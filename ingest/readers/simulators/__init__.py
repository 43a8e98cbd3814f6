"""Request tables of simulators, and our own."""
