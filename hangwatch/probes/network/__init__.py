"""Networks of this node: interfaces, ports, sockets, InfiniBand and time servers."""
