"""This node: kernel log, clock, file systems, buses, and the daemon's own surroundings."""
