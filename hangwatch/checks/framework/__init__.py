"""Definition, discovery and execution of the checks, and output of their results."""
