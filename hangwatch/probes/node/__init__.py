"""This node: kernel log, clock, file systems, buses, and the services around the daemon."""
