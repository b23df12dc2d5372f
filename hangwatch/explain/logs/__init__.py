"""What logs of ranks, launchers and the kernel say."""
