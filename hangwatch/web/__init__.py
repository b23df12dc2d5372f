"""The HTTP server and the user socket."""
