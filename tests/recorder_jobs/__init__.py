"""Real gloo jobs with flight recorders. `program` is a rank, and `started` starts a job."""
