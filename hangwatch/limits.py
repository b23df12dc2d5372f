"""Limits that several modules share. This module imports nothing: help texts show them."""

MOST_RANKS = 1 << 24
"""The largest world size that is accepted, from any source."""

LONGEST_LINE = 8192
"""Number of characters that are read of one line of a stack dump or log. JSON has no such limit."""

LONGEST_PATH = 200
"""Number of characters that are shown of a path of a job."""

MOST_DUMPED_FRAMES = 4096
"""Number of frames that are read of one thread of a stack dump."""

MOST_LISTED_RANKS = 64
"""Number of ranks that one piece of evidence lists."""

MOST_PEM_BYTES = 1 << 20
"""Size of a file with certificates or a key of the daemon."""
