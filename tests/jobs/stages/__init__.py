"""Pass objects between the stages of a job, like libraries of model parallelism."""
