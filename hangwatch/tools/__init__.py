"""Programs that people run by hand beside the daemon. The daemon, `dump` and the verdict import none of them."""
