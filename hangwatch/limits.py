"""Limits of what is accepted. This module imports nothing: help texts show them."""

MOST_RANKS = 1 << 24
"""The largest world size that is accepted, from any source."""
