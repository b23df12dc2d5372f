"""Real gloo jobs whose flight recorders are read: `program` is one rank of one, `started` starts one."""
