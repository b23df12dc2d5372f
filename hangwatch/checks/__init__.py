"""Health checks of a node. Each module in this folder is one check. `framework.registry` discovers the modules."""
