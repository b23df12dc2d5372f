"""Which processes form a training job, and which rank each of them is. Pure."""
