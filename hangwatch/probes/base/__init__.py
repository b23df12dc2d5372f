"""The base of all other probes: kernel files, processes, file systems, children with a deadline, order of owners."""
