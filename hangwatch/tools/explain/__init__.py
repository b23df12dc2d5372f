"""Explains stack dumps and logs that people already have: assigns them to ranks."""
