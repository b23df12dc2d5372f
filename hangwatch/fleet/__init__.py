"""Many nodes: collect and merge their groups."""
