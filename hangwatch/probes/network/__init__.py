"""Networks of this node: interfaces, ports, sockets, InfiniBand, time servers, and NCCL's RAS."""
