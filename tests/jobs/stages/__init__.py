"""Pass objects between the stages of a job, like libraries for model parallelism."""
