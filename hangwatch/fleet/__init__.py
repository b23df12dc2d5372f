"""Many nodes: merging what they saw, and collecting it."""
