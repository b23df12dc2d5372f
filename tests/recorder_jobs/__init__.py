"""Real gloo jobs with flight recorders for tests to read. `program` is a rank, `started` starts a job."""
