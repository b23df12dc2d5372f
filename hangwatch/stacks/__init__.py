"""Stacks to groups: what each rank does, and whether it progresses. Pure."""
