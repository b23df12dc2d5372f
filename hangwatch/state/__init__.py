"""The state of the node: one immutable snapshot, and the pure steps that change it."""
