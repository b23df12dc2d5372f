"""The self-test: ranks without a training program that test GPUs, nodes and the networks between them."""
