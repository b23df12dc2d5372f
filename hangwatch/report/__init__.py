"""Reports: an incident as text, HTML or JSON."""
