"""Definition, discovery and execution of checks, and the display of their results."""
