"""Find hung distributed training jobs, dump every rank, and name the rank that blocks the job."""

__version__ = "0.1.0"
