"""The self-test: ranks without a training program, which test GPUs, nodes and the networks between them."""
