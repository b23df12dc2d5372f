"""Adapters that read the machine: its processes, GPUs, networks and kernel files. No other package does."""
