"""Networks of this node: interfaces, ports, sockets, InfiniBand, and NCCL's RAS."""
