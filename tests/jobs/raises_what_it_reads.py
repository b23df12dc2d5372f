"""A rank that dies of an exception under torchelastic's `record`: `raises_what_it_reads.py FIFO`.

The text of the exception comes from FIFO. `record` is torch's own function. Its parent packages are replaced by
empty ones, because `import torch` takes 2 s of CPU time and `record` does not need it.
"""

import importlib.machinery
import sys
import types
from pathlib import Path

(TORCH,) = importlib.machinery.PathFinder.find_spec("torch").submodule_search_locations
for package in ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(Path(TORCH, *package.split(".")[1:]))]

from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402


class ShardError(Exception):
    """The type of the exception. Its name is not masked as a secret."""


@record
def main():
    raise ShardError(Path(sys.argv[1]).read_text())


main()
