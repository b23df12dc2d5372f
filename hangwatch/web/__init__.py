"""What leaves this node over HTTP and the user socket."""
