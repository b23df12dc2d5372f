"""The ground of all other probes: kernel files, processes, file systems, children with a deadline, turns of owners."""
