"""Read access to a shared store: the owner of a job, and a group, may read the job's incidents.

The kernel reports the owner. Only root can list all incidents. A folder for each owner lists the incidents that
this owner may read.
"""

import contextlib
import functools
import grp
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from hangwatch.store import access_lists, durable
from hangwatch.store.access_lists import Readers

log = logging.getLogger(__package__)


class Sharing:
    """The read access to the store in the folder `root`. If it is not `shared`, no other user has access."""

    def __init__(self, root: Path, *, shared: bool, group: str) -> None:
        self._root, self._incidents, self._owners = root, root / "incidents", root / "owners"
        self._is_shared, self._group = shared, group
        self._gid: int | None = None
        self._logged: set[str] = set()

    def begin(self, incidents: int) -> None:
        """Let job owners pass through the folder of incidents, and update their lists. Raises OSError."""
        if self._is_shared:
            self._gid = _gid(self._group, self._warn_once)
            self._allow(Readers(gid=self._gid, passers=True))(incidents)
            self.unlist(lambda name: not (self._incidents / name).exists())

    def owner_and_group(self, uid: int | None) -> durable.Allow:
        """Return a function that lets the job's owner `uid` and the group read a file or folder."""
        return self._allow(Readers(reader_uid(uid), self._gid))

    def group(self) -> durable.Allow:
        """Return a function that lets only the group read a file or folder."""
        return self._allow(Readers(gid=self._gid))

    def has_member(self, gids: Collection[int]) -> bool:
        """True if a user of these groups is a member of the group that may read all incidents."""
        return self._gid in gids

    def is_listed(self, name: str, uid: int) -> bool:
        """True if the list of this user has the incident of this name."""
        return (self._owners / str(uid) / name).is_symlink()

    def names_of(self, uid: int) -> list[str]:
        """Return the names of the incidents in this user's list. Raises OSError."""
        try:
            return [path.name for path in (self._owners / str(uid)).iterdir()]
        except FileNotFoundError:
            return []

    def _allow(self, readers: Readers) -> durable.Allow:
        """Return a function that lets these readers read a file or folder, if the file system supports it."""

        def allow(descriptor: int) -> None:
            if not self._is_shared or readers == Readers():
                return
            try:
                access_lists.allow(descriptor, readers)
                return
            except OSError as error:
                self._warn_once(f"job owners cannot read their incidents: no access control list: {error.strerror}")
            try:
                access_lists.allow_group(descriptor, readers)
            except OSError as error:
                self._warn_once(f"[store] group = {self._group!r} cannot read incidents: {error.strerror}")

        return allow

    def enlist(self, name: str, uid: int | None) -> None:
        """Add an incident to the list of its owner. Raises OSError."""
        reader = reader_uid(uid)
        if not self._is_shared or reader is None:
            return
        with durable.folder(self._root) as root, durable.made_folder("owners", root) as owners:
            durable.refuse_unsafe(self._owners, owners)
            os.fchmod(owners, 0o711)
            with durable.made_folder(str(reader), owners) as folder:
                durable.refuse_unsafe(self._owners / str(reader), folder)
                self._allow(Readers(uid=reader))(folder)
                with contextlib.suppress(FileExistsError):
                    os.symlink(f"../../incidents/{name}", name, dir_fd=folder)

    def unlist(self, is_gone: Callable[[str], bool]) -> None:
        """Remove the incidents for which `is_gone` is true from the lists of all owners. Raises OSError."""
        for folder in self._owners.iterdir() if self._is_shared and self._owners.is_dir() else ():
            for entry in folder.iterdir():
                if is_gone(entry.name):
                    entry.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails if the folder is not empty

    def _warn_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.warning("%s: %s", self._incidents, message)


def _gid(group: str, warn: Callable[[str], None]) -> int | None:
    """Return the gid of a group, by name or number; None, with a warning, if unknown. LDAP may be down."""
    if group.isascii() and group.isdigit():
        return int(group)
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        warn(f"[store] group = {group!r}: no such group on this machine; only root and job owners can read incidents")
        return None


def reader_uid(uid: int | None) -> int | None:
    """Return the uid for an access list; None for root, which can read everything, and for the overflow uid."""
    return uid if uid not in (0, overflow_uid()) else None


@functools.cache
def overflow_uid() -> int:
    """Return the uid that the kernel shows for users without a uid in this namespace, see user_namespaces(7)."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534
