"""Captures: stacks of all ranks of a job and of their workers, taken under deadlines."""
