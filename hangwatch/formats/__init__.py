"""Parsers of foreign formats, and bounded reading of files that other users can write."""
