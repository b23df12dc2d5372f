"""Bytes written to the file system that a rank waits for. The files of /proc and /sys have the kernel's format."""

from pathlib import Path

import pytest

from hangwatch.probes.base.filesystems import Mount, written_bytes

# show_vfsstat in fs/proc_namespace.c, nfs_show_stats in fs/nfs/super.c. The sixth count is bytes sent to the server.
MOUNTSTATS = """\
device rootfs mounted on / with fstype rootfs
device proc mounted on /proc with fstype proc
device nas:/a mounted on /mnt/a with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys
\tage:\t614
\tevents:\t1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27
\tbytes:\t11 12 13 14 15 16 17 18
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\tper-op statistics
\t       WRITE: 4 4 0 4194900 544 0 9 9 0
device nas:/b mounted on /mnt/the\\040data with fstype nfs statvers=1.1
\topts:\trw,vers=3
\tbytes:\t21 22 23 24 25 26 27 28
"""


def mount(path: str, kind: str, device: str = "0:57") -> Mount:
    return Mount(path=path, type=kind, source="nas:/a", device=device, id="1")


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("/mnt/a", "nfs4", 16),
        ("/mnt/the data", "nfs", 26),
        ("/mnt/elsewhere", "nfs4", None),
        ("/mnt/a", "lustre", None),
        ("/proc", "nfs4", None),
    ],
    ids=["NFS 4", "a path with a space", "not mounted there", "no NFS", "no counters"],
)
def test_written_bytes_of_an_nfs_mount_are_read(path: str, kind: str, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/mountstats").write_text(MOUNTSTATS)
    assert written_bytes(mount(path, kind), 7, tmp_path, tmp_path / "sys") == expected


def test_written_bytes_of_a_device_are_in_sectors(tmp_path: Path) -> None:
    """Convert sectors of 512 bytes, on every device: the seventh number in Documentation/block/stat.rst."""
    (tmp_path / "dev/block/259:1").mkdir(parents=True)
    (tmp_path / "dev/block/259:1/stat").write_text(f"{' '.join(str(10 * number) for number in range(1, 18))}\n")
    assert written_bytes(mount("/", "ext4", "259:1"), 7, tmp_path, tmp_path) == 70 * 512
