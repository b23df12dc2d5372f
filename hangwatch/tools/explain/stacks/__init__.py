"""Parsers of stack dumps as text, one module for each tool."""
