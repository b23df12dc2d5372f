"""Jobs on many nodes: running commands there, collecting the replies, and merging the groups of ranks."""
