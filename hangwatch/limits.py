"""Limits of what is accepted. This module imports nothing: help texts show them."""

MOST_RANKS = 1 << 24
"""The largest world size that is accepted, from any source."""

LONGEST_LINE = 8192
"""Number of characters that are read of one line of a stack dump or log. JSON has no such limit."""
