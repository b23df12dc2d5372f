"""Hangs and healthy look-alikes, each with its expected result. `make scenarios` writes docs/benchmarks.md."""
