"""From stacks to groups: the activity of each rank, and if it progresses. Pure."""
