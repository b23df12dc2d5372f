"""The HTTP server and the user socket of the daemon."""
