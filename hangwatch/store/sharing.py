"""Who may read the incidents of a shared store: the owner of a job, as the kernel names him, and a group.

A folder for each owner lists what he may read, since nobody but root lists those of all.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import logging
import os
from collections.abc import Callable
from pathlib import Path

from hangwatch.store import access_lists, durable
from hangwatch.store.access_lists import Readers

log = logging.getLogger(__package__)


class Sharing:
    """The readers of the store under `root`. Only of one that is `shared` are the files and lists made theirs."""

    def __init__(self, root: Path, *, shared: bool, group: str) -> None:
        self._root, self._incidents, self._owners = root, root / "incidents", root / "owners"
        self._is_shared, self._group = shared, group
        self._gid: int | None = None
        self._said: set[str] = set()

    def begin(self, incidents: int) -> None:
        """Let owners pass through the folder of incidents, and drop from their lists what is gone. Raises OSError."""
        if self._is_shared:
            self._gid = _gid(self._group, self._say_once)
            self._allow(Readers(gid=self._gid, passers=True))(incidents)
            self.unlist(lambda name: not (self._incidents / name).exists())

    def owner_and_group(self, uid: int | None) -> durable.Allow:
        """What lets the owner of a job and the group read a file or a folder."""
        return self._allow(Readers(reader_uid(uid), self._gid))

    def group(self) -> durable.Allow:
        """What lets the group alone read a file or a folder."""
        return self._allow(Readers(gid=self._gid))

    def is_listed(self, name: str, uid: int) -> bool:
        """Whether this user's folder lists the incident of this name."""
        return (self._owners / str(uid) / name).is_symlink()

    def names_of(self, uid: int) -> list[str]:
        """The incidents that this user's folder lists. Raises OSError."""
        try:
            return [path.name for path in (self._owners / str(uid)).iterdir()]
        except FileNotFoundError:
            return []

    def _allow(self, who: Readers) -> durable.Allow:
        """What lets these read a file or folder of a shared store, as far as the file system can."""

        def allow(descriptor: int) -> None:
            if not self._is_shared or who == Readers():
                return
            try:
                access_lists.allow(descriptor, who)
                return
            except OSError as error:
                self._say_once(f"jobs' owners cannot read their incidents: no access control list: {error.strerror}")
            try:
                access_lists.allow_group(descriptor, who)
            except OSError as error:
                self._say_once(f"[store] group = {self._group!r} cannot read incidents: {error.strerror}")

        return allow

    def enlist(self, name: str, uid: int | None) -> None:
        """Put an incident into the folder that its owner can list. Raises OSError."""
        reader = reader_uid(uid)
        if not self._is_shared or reader is None:
            return
        with durable.folder(self._root) as root, durable.made_folder("owners", root) as owners:
            durable.refuse_unsafe(self._owners, owners)
            os.fchmod(owners, 0o711)
            with durable.made_folder(str(reader), owners) as own:
                durable.refuse_unsafe(self._owners / str(reader), own)
                self._allow(Readers(uid=reader))(own)
                with contextlib.suppress(FileExistsError):
                    os.symlink(f"../../incidents/{name}", name, dir_fd=own)

    def unlist(self, is_gone: Callable[[str], bool]) -> None:
        """Take incidents out of the owners' folders. Raises OSError."""
        for folder in self._owners.iterdir() if self._is_shared and self._owners.is_dir() else ():
            for entry in folder.iterdir():
                if is_gone(entry.name):
                    entry.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing is left

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s: %s", self._incidents, message)


def _gid(group: str, say: Callable[[str], None]) -> int | None:
    """The number of a group by its name or number; None, and said, where nobody knows it: that may pass (LDAP)."""
    if group.isascii() and group.isdigit():
        return int(group)
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        say(f"[store] group = {group!r}: no such group on this machine; nobody but root and owners reads incidents")
        return None


def reader_uid(uid: int | None) -> int | None:
    """The owner whom a list should name: not root, who reads all, nor the number that stands for unknown users."""
    return uid if uid not in (0, overflow_uid()) else None


@functools.cache
def overflow_uid() -> int:
    """The uid that user_namespaces(7) shows for everybody without a number here; usually that of `nobody`, too."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534
