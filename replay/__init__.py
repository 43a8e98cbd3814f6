"""The driver: observed requests through the simulator."""
