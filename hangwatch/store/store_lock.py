"""The lock of the store: only one daemon may write to a state directory."""

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from hangwatch.errors import TemporaryError
from hangwatch.formats.incident_file import NO_LINK, StoreError
from hangwatch.store import durable
from hangwatch.store.durable import explain_errors

LOCK_FILE = "lock"


class StoreTakenError(StoreError, TemporaryError):
    """Another daemon uses this state directory. The message has the daemon's pid, if it is known."""


class Lock:
    """The lock of the state directory `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._taking = threading.Lock()
        self._descriptor: int | None = None

    def take(self) -> None:
        """Lock the directory until `give_back` or the end of the process. If the lock is held already, do nothing.

        If the directory was removed meanwhile, lock the new one.

        The lock is an flock(2), which the kernel releases when the process dies. This function does not wait.
        Raises StoreTakenError if another process has the lock, and StoreError if the lock file cannot be made (disk
        full, read-only).
        """
        with self._taking:
            if self._descriptor is not None and self._is_removed(self._descriptor):
                self.give_back()
            if self._descriptor is None:
                self._descriptor = self._locked()

    def _is_removed(self, descriptor: int) -> bool:
        """True if the locked file is no longer in the directory. A second daemon could lock another file there."""
        try:
            return not os.path.samestat(os.fstat(descriptor), (self._root / LOCK_FILE).lstat())
        except FileNotFoundError:
            return True
        except OSError:  # the file system does not respond or is broken: keep the lock
            return False

    def _locked(self) -> int:
        """Lock the file and return its descriptor, which holds the lock."""
        path = self._root / LOCK_FILE
        with explain_errors(self._root / "incidents"):
            self._root.mkdir(mode=0o755, parents=True, exist_ok=True)
            with durable.folder(self._root) as root:
                durable.refuse_unsafe(self._root, root)
                descriptor = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_LINK, 0o600, dir_fd=root)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).strip()
                os.close(descriptor)
                other = f"another hangwatch (pid {holder.decode()})" if holder.isdigit() else "another hangwatch"
                raise StoreTakenError(
                    f"{path}: {other} already uses this directory\n  stop it, or set a different [store] directory"
                ) from None
            except OSError:
                os.close(descriptor)
                raise
        with contextlib.suppress(OSError):  # on a full disk the file has no pid, but the lock holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor

    def give_back(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
