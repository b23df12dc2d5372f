"""Adapters to the machine. Nothing else reads it."""
