"""Functions that pass objects between the stages of a job, as libraries for model parallelism have them."""
