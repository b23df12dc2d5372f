"""Readers of the flight recorder dumps that torch itself writes."""
