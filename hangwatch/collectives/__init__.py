"""What the ranks of a job have enqueued: sequence numbers, and the wait-for graph that follows. Pure."""
