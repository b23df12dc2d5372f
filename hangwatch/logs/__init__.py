"""Readers of the logs of ranks, launchers and the kernel."""
