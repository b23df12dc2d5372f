"""hangwatch: finds hung distributed training jobs, dumps every rank, names the odd one."""

__version__ = "0.1.0"
