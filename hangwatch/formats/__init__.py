"""Parsers of foreign formats, and bounded reading of files that others can write."""
