"""Hangs and healthy look-alikes with the expected result of each. `make scenarios` writes docs/measurements.md."""
