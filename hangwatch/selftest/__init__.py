"""The self-test: ranks without a training program, which show whether these GPUs, nodes and networks can talk."""
