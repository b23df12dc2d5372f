"""Regions of shared memory of a process that has the maximum number of mappings."""

from collections.abc import Iterable
from pathlib import Path

from hangwatch.probes.process import shared_locks

MAPPED = 3 * shared_locks.MOST_REGIONS
FIRST, APART, LENGTH = 0x7F0000000000, 0x2000, 0x1000
OLDEST = FIRST + (MAPPED - 1) * APART


def test_regions_beyond_the_limit_keep_those_assigned_first(tmp_path: Path) -> None:
    write_maps(tmp_path, inodes=[7] * MAPPED)

    found = shared_locks.regions(4711, tmp_path)

    assert sum(map(len, found.values())) == shared_locks.MOST_REGIONS
    assert shared_locks.region_at(OLDEST, found) == b"00:01 7"
    assert shared_locks.region_at(FIRST, found) is None


def test_regions_of_many_files_are_bounded(tmp_path: Path) -> None:
    write_maps(tmp_path, inodes=range(1, MAPPED + 1))

    found = shared_locks.regions(4711, tmp_path, 5)

    assert list(found) == [b"00:01 %d" % inode for inode in range(MAPPED - 4, MAPPED + 1)]


def write_maps(proc_root: Path, inodes: Iterable[int]) -> None:
    """Write the maps file of a process. It has mapped one page of each of these files."""
    starts = range(FIRST, OLDEST + 1, APART)
    lines = [
        f"{start:x}-{start + LENGTH:x} rw-s 00000000 00:01 {inode}    /dev/shm/sem.x (deleted)\n"
        for start, inode in zip(starts, inodes, strict=True)
    ]
    (proc_root / "4711").mkdir()
    (proc_root / "4711" / "maps").write_text("".join(lines))
