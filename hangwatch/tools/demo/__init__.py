"""A simulated node: real processes, simulated GPU power."""
