"""hangwatch: finds hung distributed training jobs, dumps every rank, names the culprit."""

__version__ = "0.1.0"
