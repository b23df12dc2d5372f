"""What a check is, how checks are found and run, and how their results are shown."""
