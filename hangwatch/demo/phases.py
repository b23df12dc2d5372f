"""What each rank is doing, in memory that ranks write and the simulated GPUs read.

Standard library only: ranks import it. A rank that got stuck cannot tell anybody. So a slot holds what the rank began,
and when: the reader sees that a phase has become too old to be work.
"""

from __future__ import annotations

import mmap
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_SLOT = struct.Struct("=dq")


class Phase(IntEnum):
    """What a rank was doing when it last said so."""

    STARTING = 0
    LOADING = 1
    COMPUTE = 2
    COLLECTIVE = 3
    CHECKPOINT = 4
    EVALUATION = 5
    IDLE = 6


class Seen(NamedTuple):
    """A phase and for how many seconds it has lasted."""

    phase: Phase
    age_seconds: float


class Phases:
    """One slot per local rank in a small shared file; each rank writes its own slot only."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, ranks: int) -> Phases:
        """Make the file with all ranks in STARTING."""
        path.write_bytes(_SLOT.pack(time.monotonic(), Phase.STARTING) * ranks)
        return Phases(path)

    def enter(self, local_rank: int, phase: Phase) -> None:
        """Say what this rank begins to do now."""
        _SLOT.pack_into(self._memory, local_rank * _SLOT.size, time.monotonic(), phase)

    def read(self, local_rank: int) -> Seen:
        """What a rank said last, and how long ago."""
        since, phase = _SLOT.unpack_from(self._memory, local_rank * _SLOT.size)
        return Seen(Phase(phase), time.monotonic() - since)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
