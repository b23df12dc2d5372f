"""Pure: the operations that the ranks of a job have enqueued: sequence numbers, and the wait-for graph of them."""
