"""The only doors to the machine: one foreign library or kernel interface each."""
