"""Scheduled tasks of the daemon, and limits between job owners."""
