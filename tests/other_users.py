"""Commands and threads that run as another user of the machine, for tests of the kernel's permissions."""

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a kernel that gives mount namespaces; in a chroot, a root that is a mount point",
)

_SYS_SETRESUID = 117 if os.uname().machine == "x86_64" else 147

# The interpreter and the checkout may be in folders that only root may enter (/root/.pyenv). In a private mount
# namespace, an empty folder replaces such a folder, and the needed files are bind-mounted into it. Other processes see no change.
_OPENED = """
closed=$1 count=$2; shift 2
mount -t tmpfs -o mode=0755 tmpfs /mnt
number=0
while [ $number -lt $count ]; do
    mkdir /mnt/$number; mount --rbind "$1" /mnt/$number
    set -- "$@" "$1"; shift; number=$((number + 1))
done
# The trees now stand behind the command; turn them to the front again.
turns=$(($# - count)); while [ $turns -gt 0 ]; do set -- "$@" "$1"; shift; turns=$((turns - 1)); done
mount -t tmpfs -o mode=0755 tmpfs "$closed"
number=0
while [ $number -lt $count ]; do
    mkdir -p "$1"; mount --rbind /mnt/$number "$1"; shift; number=$((number + 1))
done
exec "$@"
"""


def as_user(uid: int, gid: int | None = None, groups: Iterable[int] = ()) -> list[str]:
    """Return the beginning of a command that runs the rest as user `uid` with `gid` and `groups`."""
    others = ",".join(map(str, groups))
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}"]
    become += [f"--groups={others}" if others else "--clear-groups", "--inh-caps=-all"]
    trees = sorted({sys.base_prefix, sys.prefix, str(Path(__file__).parents[1])})
    needed: dict[Path, list[str]] = {}
    for tree in trees:
        for closed in [parent for parent in reversed(Path(tree).parents) if not parent.stat().st_mode & 1][:1]:
            needed.setdefault(closed, []).append(tree)
    opened = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _OPENED, "sh"]
    steps = ([*opened, str(closed), str(len(inside)), *inside] for closed, inside in needed.items())
    return [*itertools.chain.from_iterable(steps), *become]


@contextmanager
def as_thread_of(uid: int) -> Iterator[None]:
    """Run this thread alone as user `uid` until the end of `with`: glibc's setresuid changes all threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(_SYS_SETRESUID, -1, uid, -1) == 0
    try:
        yield
    finally:
        assert libc.syscall(_SYS_SETRESUID, -1, 0, -1) == 0
