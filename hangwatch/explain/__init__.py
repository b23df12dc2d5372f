"""Explain stack dumps and logs that people already have: assign them to ranks."""
