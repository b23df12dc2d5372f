"""An Incident, and nothing else, rendered as text, HTML or JSON."""
