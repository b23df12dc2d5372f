"""One file = one check; the folder is discovered, there is no list to keep."""
