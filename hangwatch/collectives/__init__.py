"""The operations that the ranks of a job have enqueued, their sequence numbers, and the wait-for graph. Pure."""
