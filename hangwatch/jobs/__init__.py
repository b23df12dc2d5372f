"""Discovery of the training jobs among the processes of a node, and of the rank of each process. Pure."""
