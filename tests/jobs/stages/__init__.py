"""How the stages of a job hand objects on, in the manner of libraries of model parallelism."""
