"""Find the training jobs among the processes of a node, and the rank of each process. Pure."""
