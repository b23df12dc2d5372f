"""Rendering of an incident as text, HTML or JSON."""
