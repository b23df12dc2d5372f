"""Hangs and healthy look-alikes, and what hangwatch must make of each. `make scenarios` writes docs/measurements.md."""
