"""The current phase of each rank, in shared memory: ranks write it, and the simulated GPUs read it.

Standard library only, because ranks import it. A stuck rank cannot report that it is stuck. So the memory also has
the time at which each phase began: a phase that began too long ago is no longer work.
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
    """The phases of a rank."""

    STARTING = 0
    LOADING = 1
    COMPUTE = 2
    COLLECTIVE = 3
    EVALUATION = 4


class PhaseAge(NamedTuple):
    """A phase and the seconds since it began."""

    phase: Phase
    age_seconds: float


class Phases:
    """A small shared file with the phase of each local rank. Each rank writes only its own slot."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, ranks: int) -> Phases:
        """Create the file. The phase of all ranks is STARTING."""
        path.write_bytes(_SLOT.pack(time.monotonic(), Phase.STARTING) * ranks)
        return Phases(path)

    def enter(self, local_rank: int, phase: Phase) -> None:
        """Record that this rank enters a phase now."""
        _SLOT.pack_into(self._memory, local_rank * _SLOT.size, time.monotonic(), phase)

    def read(self, local_rank: int) -> PhaseAge:
        """Return the phase that a rank last entered, and its age."""
        since, phase = _SLOT.unpack_from(self._memory, local_rank * _SLOT.size)
        return PhaseAge(Phase(phase), time.monotonic() - since)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
