"""Processes of this node: their state, memory, environment and stacks."""
