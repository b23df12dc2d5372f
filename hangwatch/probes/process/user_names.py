"""Find the names of user ids by the name service of the host: files, LDAP, SSSD.

A name that a process gives itself (USER) is never used: its owner chooses it. The directory server may be down, so
getent(1) runs in a child with a deadline, in a thread that no scan waits for longer than a moment. Until it answers, a
job has its user id.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import Job, ProcessId
from hangwatch.probes.base import child_runner, procfs

DEADLINE_SECONDS = 5.0
WAIT_SECONDS = 0.5  # of the scan that asks first; a local file answers in milliseconds
RETRY_SECONDS = 300.0
MOST_NAMES = 4096
_MOST_AT_ONCE = 64
_ENTRY = re.compile(rb"([A-Za-z0-9_.@\\-]{1,64}\$?):[^:]*:(\d{1,10}):")
_USER_ID = re.compile(r"uid (\d+)")


class UserNames:
    """A cache of the names of user ids."""

    def __init__(self, proc_root: Path) -> None:
        self._proc_root = proc_root
        self._runner = child_runner.Runner("getent")
        self._names: dict[int, str] = {}
        self._asked_at: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def add_to(self, jobs: Iterable[Job]) -> tuple[Job, ...]:
        """Return the jobs with the names of their users, as far as the name service has told them.

        A job in another user or mount namespace keeps its user id: the id may belong to somebody else there.
        """
        ids = [(job, self._find_user_id(job)) for job in jobs]
        self._ask([uid for _, uid in ids if uid is not None])
        return tuple(
            replace(job, user=self._names[uid]) if uid is not None and uid in self._names else job for job, uid in ids
        )

    def _find_user_id(self, job: Job) -> int | None:
        """Return the user id of a job of this host, if it is the host that has the name service; else None."""
        match = _USER_ID.fullmatch(job.user or "")
        process = job.ranks[0].id if job.ranks else job.launcher_id
        return int(match[1]) if match and process and self._is_of_host(process) else None

    def _is_of_host(self, process: ProcessId) -> bool:
        try:
            is_host = os.path.samestat(os.stat(self._proc_root / "1" / "root"), os.stat("/"))  # noqa: PTH116
        except PermissionError:
            is_host = True  # `dump` of a user: it sees the processes of that user alone
        except OSError:
            is_host = False
        return is_host and all(
            (space := procfs.namespace(self._proc_root, process.pid, kind)) is not None
            and space in {procfs.namespace(self._proc_root, other, kind) for other in (1, "self")}
            for kind in ("user", "mnt")
        )

    def _ask(self, uids: Sequence[int]) -> None:
        now = time.monotonic()
        due = {uid for uid in uids if now - self._asked_at.get(uid, -RETRY_SECONDS) >= RETRY_SECONDS}
        if not due or (self._thread is not None and self._thread.is_alive()):
            return
        if len(self._asked_at) >= MOST_NAMES:
            self._names, self._asked_at = {}, {}
        asked = sorted(due)[:_MOST_AT_ONCE]
        self._asked_at |= dict.fromkeys(asked, now)
        self._thread = threading.Thread(target=self._run, args=(asked,), name="names of users", daemon=True)
        self._thread.start()
        self._thread.join(WAIT_SECONDS)

    def _run(self, uids: Sequence[int]) -> None:
        printed = self._runner.run(["getent", "passwd", *map(str, uids)], deadline_seconds=DEADLINE_SECONDS)
        if isinstance(printed, child_runner.Printed):
            entries = [_ENTRY.match(line) for line in printed.out.splitlines()]
            self._names |= {int(entry[2]): entry[1].decode() for entry in entries if entry and int(entry[2]) in uids}
