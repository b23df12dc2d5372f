"""Access control lists of files and folders, see acl(5), written through xattr(7).

The value of the attribute is a version and a list of (tag, rights, id). So neither a library nor `setfacl` is
needed, which many nodes do not have.
"""

import os
import stat
import struct
from typing import NamedTuple

_ATTRIBUTE = "system.posix_acl_access"
_VERSION = 2
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_READ, _WRITE, _SEARCH = 4, 2, 1


class Readers(NamedTuple):
    """The user and the group, by number, that may read. `passers`: all users may pass through a folder."""

    uid: int | None = None
    gid: int | None = None
    passers: bool = False


def allow(descriptor: int, readers: Readers) -> None:
    """Let only these readers and the daemon's user read an open file or folder.

    Raises OSError; then nothing has changed. Its errno is EOPNOTSUPP if the file system has no access control lists.
    """
    search, others = _rights(descriptor, readers)
    entries = [(_USER_OBJ, _READ | _WRITE | search, _NO_ID)]
    if readers.uid is not None:
        entries.append((_USER, _READ | search, readers.uid))
    entries.append((_GROUP_OBJ, 0, _NO_ID))
    if readers.gid is not None:
        entries.append((_GROUP, _READ | search, readers.gid))
    entries += [(_MASK, _READ | search, _NO_ID), (_OTHER, others, _NO_ID)]
    value = struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(descriptor, _ATTRIBUTE, value)


def allow_group(descriptor: int, readers: Readers) -> None:
    """Let a group read a file by its mode, for file systems without access control lists. Raises OSError."""
    search, others = _rights(descriptor, readers)
    group = 0
    if readers.gid is not None:
        os.fchown(descriptor, -1, readers.gid)
        group = _READ | search
    os.fchmod(descriptor, (_READ | _WRITE | search) << 6 | group << 3 | others)


def copy_readers(source: int, target: int) -> None:
    """Let the readers of one open file read another file. Raises OSError."""
    try:
        value = os.getxattr(source, _ATTRIBUTE)
    except OSError:  # without a list, the mode and the group decide
        status = os.fstat(source)
        os.fchown(target, -1, status.st_gid)
        os.fchmod(target, stat.S_IMODE(status.st_mode))
        return
    os.setxattr(target, _ATTRIBUTE, value)


def _rights(descriptor: int, readers: Readers) -> tuple[int, int]:
    """Return the rights that a reader needs besides reading, and the rights of all other users."""
    is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    return (_SEARCH if is_folder else 0), (_SEARCH if is_folder and readers.passers else 0)
