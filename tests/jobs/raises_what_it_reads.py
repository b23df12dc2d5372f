"""A rank that dies of an exception under torchelastic's `record`: `raises_what_it_reads.py FIFO`, whose text is raised."""

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


class ShardError(Exception):
    """The type of its exception, which is no secret."""


@record
def main():
    raise ShardError(Path(sys.argv[1]).read_text())


main()
