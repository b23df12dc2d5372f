"""Parsers of foreign formats, and reading files of others within bounds."""
