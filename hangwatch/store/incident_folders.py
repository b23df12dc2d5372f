"""Incident folders on disk: kept private, written whole, pruned by count, bytes and age.

    <root>/incidents/20260314T031500Z-2180718/incident.json  the value, from which everything else can be made again
                                              marker.json    until that is there: one line, see `Store.mark`
                                              order          the how-manieth it was: what prunes does not ask a clock
                                              owner          whose job it was: of who has most the oldest goes first
                                              crash    of a crash: whose; of one owner so many are kept, and of all
                                              report.txt, report.html, dumps/...   what the caller passes to `save`
                                              hooks/on_hung.txt                    what a hook printed last

           owners/1004/20260314T031500Z-2180718 -> ../../incidents/...  what that user may read, for him to list
           lock                                  held by the daemon that writes here, with its pid in it

Stacks and command lines are only for those who may see them, so the folders are 0700 and the files 0600. The daemon's
store is shared: the owner of a job, as the kernel names him, may read its incidents, and a group may read all.
"""

from __future__ import annotations

import calendar
import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from hangwatch import config, words
from hangwatch.formats import bounded_read, incident_file
from hangwatch.formats.incident_file import (
    INCIDENT_FILE,
    MARKER_FILE,
    StoreError,
    Summary,
    folder_size_bytes,
    read_bytes,
)
from hangwatch.model import CRASHED, OPEN_STATES, Incident, Job
from hangwatch.store import durable, retention
from hangwatch.store.error_advice import explained
from hangwatch.store.retention import Stored
from hangwatch.store.sharing import Sharing, reader_uid
from hangwatch.store.store_lock import Lock

log = logging.getLogger(__package__)

ORDER_FILE = "order"
OWNER_FILE = "owner"
CRASH_FILE = "crash"
MOST_LEFT_OPEN = 256
MOST_LEFT_OPEN_BYTES = 16 << 20  # eight ranks take half of one MiB
_USUAL = config.Store()
_FOLDER = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9._-]+")
_FILE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127}/){0,3}[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SAME_NAME = 9
_LONGEST_OWNER = 512
_LISTED = 8  # names in a message


def open_writable(root: Path) -> Store:
    """A store of the usual bounds that can be written. Raises StoreError as `Store.make_writable` does."""
    store = Store(root)
    store.make_writable()
    return store


class Store:
    """The incidents under `root`. Reading asks for nothing; to write, begin with `make_writable`."""

    def __init__(
        self,
        root: Path,
        *,
        max_incidents: int = _USUAL.max_incidents,
        max_bytes: int = _USUAL.max_bytes,
        max_age_days: float = _USUAL.max_age_days,
        shared: bool = False,
        group: str = "",
    ) -> None:
        self.root = root
        self.incidents = root / "incidents"
        self._lock = Lock(root)
        self._sharing = Sharing(root, shared=shared, group=group)
        self._max_incidents = max_incidents
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_days * 86400.0

    def lock(self) -> None:
        """Take the directory for this process, until `unlock` or its end. Raises StoreTakenError, StoreError."""
        self._lock.take()

    def unlock(self) -> None:
        """Give the directory back."""
        self._lock.give_back()

    def left_open(self, node: str) -> tuple[Incident, ...]:
        """The incidents of this node that nobody has closed, newest first; what cannot be read is said and left out.

        At most `MOST_LEFT_OPEN` and `MOST_LEFT_OPEN_BYTES` of them, the owners in turn: they stay in memory. Raises
        StoreError.
        """
        listed = [
            self.incidents / summary.folder
            for summary in self.summaries()
            if summary.node == node and summary.closed_unix_seconds is None and summary.state in OPEN_STATES
        ]
        turns = retention.in_turn(self._line_in(folder.name, OWNER_FILE) or "" for folder in listed)
        found: dict[int, Incident] = {}
        left_out: list[Path] = []
        left_bytes = MOST_LEFT_OPEN_BYTES
        for turn in turns:
            folder = listed[turn]
            try:
                size_bytes = (folder / INCIDENT_FILE).lstat().st_size
                if size_bytes > left_bytes or len(found) == MOST_LEFT_OPEN:
                    left_out.append(folder)
                    continue
                found[turn] = incident_file.of_some_day(incident_file.load(folder), folder)
                left_bytes -= size_bytes
            except (OSError, StoreError) as error:
                log.warning("an incident that is open cannot be read: %s", error)
        if left_out:
            more = f", beside {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
            log.warning("%s: is open, and one too many to go on with%s", left_out[0], more)
        return tuple(found[turn] for turn in sorted(found))

    def make_writable(self) -> None:
        """Make the folders, and remove what a crash left behind.

        Raises StoreError with the remedy where nothing can be written, where a link or a file is in the place of a
        folder, and where other users could change what is in it.
        """
        with explained(self.incidents):
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            with self.opened() as incidents:
                durable.remove_leftovers(self.incidents, is_locked=self._lock.is_held)
                durable.prove_writable(incidents)
                self._sharing.begin(incidents)

    def mark(self, incident: Incident) -> None:
        """Leave one line on disk which says that this incident is about to be saved; nothing where it already is there.

        `save` makes the folder whole; where that never happens, `summaries` lists the line. Raises StoreError.
        """
        with explained(self.incidents), self.opened() as incidents:
            name = self._name_of(incident)
            if not (self.incidents / name).exists():
                self._create(incidents, name, incident, {MARKER_FILE: incident_file.encode_marker(incident)})

    def save(self, incident: Incident, files: Mapping[str, str | bytes]) -> Path:
        """Write an incident, or write it again, with the files beside it ("report.txt", "dumps/1-3/rank7.txt").

        A new folder appears whole or not at all. In one that exists each file is replaced by rename, and files under
        `dumps/`, which never change, stay as they are. Where a marker stands, incident.json comes last, and the marker
        goes; another one of the same job may be all that is left of an earlier hang, and stays. Raises StoreError
        (disk full, not writable): what was stored before is untouched.
        """
        content = {
            INCIDENT_FILE: incident_file.encode(incident),
            **{name: _bytes(text) for name, text in files.items()},
        }
        for name in content:
            if not _FILE.fullmatch(name):
                raise StoreError(f"{name!r} is no name for a file of an incident")
        with explained(self.incidents), self.opened() as incidents:
            name = self._name_of(incident)
            folder = self.incidents / name
            is_marked = (folder / MARKER_FILE).exists()
            if folder.exists():
                new = {path: data for path, data in content.items() if _is_new(folder, path)}
                if is_marked:
                    new[INCIDENT_FILE] = new.pop(INCIDENT_FILE)
                durable.update(incidents, name, new, self._sharing.owner_and_group(incident.job.uid))
                self._sharing.enlist(name, incident.job.uid)
            else:
                self._create(incidents, name, incident, content)
            if is_marked:
                durable.discard(incidents, name, MARKER_FILE)
        return folder

    def _create(self, incidents: int, name: str, incident: Incident, content: Mapping[str, bytes]) -> None:
        """Make the folder of an incident, readable by its owner and in the owner's list. Raises OSError."""
        order = 1 + max(map(self._order, self._names()), default=0)
        whole = {**content, OWNER_FILE: _bytes(_owner(incident.job)), ORDER_FILE: str(order).encode()}
        if incident.verdict.kind == CRASHED:
            whole[CRASH_FILE] = _bytes(incident.job.share or incident.job.owner)
        durable.create(incidents, name, whole, self._sharing.owner_and_group(incident.job.uid))
        self._sharing.enlist(name, incident.job.uid)

    def add_output(self, name: str, file_name: str, content: bytes) -> None:
        """Keep what a hook printed in the incident of this name, for root, us and the group; its owner reads it not.

        Raises StoreError.
        """
        allow = self._sharing.group()
        with explained(self.incidents), self.opened() as incidents, durable.folder(name, incidents) as folder:
            durable.refuse_unsafe(self.incidents / name, folder)
            durable.add(folder, "hooks", {file_name: content}, allow)

    def is_listed(self, name: str, uid: int) -> bool:
        """Whether the incident of this name is one that this user may read, being the owner of its job."""
        return bool(_FOLDER.fullmatch(name)) and self._sharing.is_listed(name, uid)

    def summaries(self, of_user: int | None = None) -> tuple[Summary, ...]:
        """All incidents that we may read, or of these one user's, newest first; broken ones too. Raises StoreError."""
        names = (name for name in self._readable() if of_user is None or self.is_listed(name, of_user))
        return tuple(incident_file.summary(self.incidents / name) for name in names)

    def find(self, name: str) -> Path:
        """The folder of an incident, by its name or a part of it that fits only one. Raises StoreError."""
        names = self._readable()
        found = [name] if name in names else [other for other in names if name in other]
        if len(found) == 1:
            return self.incidents / found[0]
        what = f"fits {len(found)} incidents" if found else "is no incident"
        listed = ", ".join((found or names)[:_LISTED]) or "none that you may read"
        raise StoreError(
            f"{name!r} {what} in {self.incidents}\n  newest first: {listed}; `hangwatch incidents` lists all"
        )

    def newest(self, job: str | None = None) -> Path | None:
        """The folder of the newest incident that we may read, or of the newest of a job, by its key, id or name.

        None where there is no incident at all. Raises StoreError where there is none of that job, and where several
        jobs go by that name.
        """
        if job is None:
            return next((self.incidents / name for name in self._readable()), None)
        found = incident_file.newest(self.summaries(), job, str(self.incidents))
        return self.incidents / found.folder if found is not None else None

    def open_file(self, incident_id: str, name: str) -> BinaryIO | None:
        """One file of one incident, by the name of its folder, to read; None where there is no such file.

        No link below the store is followed.
        """
        if not (_FOLDER.fullmatch(incident_id) and _FILE.fullmatch(name)):
            return None
        try:
            return bounded_read.opened_below(self.root, self.incidents / incident_id / name)
        except bounded_read.FileError:
            return None

    def prune(self, open_folders: frozenset[str] = frozenset(), *, by_age: int = 0) -> tuple[str, ...]:
        """Remove what is too many or too big, see `retention`, and return the names; never `open_folders`.

        At most `by_age` more go because a later one began so long after them: a clock that steps by a month must not
        cost all of them. Raises StoreError where a folder cannot be removed.
        """
        newest_first = self._in_order()
        stored = [
            Stored(
                name=name,
                owner=self._line_in(name, OWNER_FILE) or "",
                size_bytes=folder_size_bytes(self.incidents / name),
                is_open=name in open_folders,
                crash_of=self._line_in(name, CRASH_FILE),
            )
            for name in newest_first
        ]
        surplus = retention.surplus(stored, self._max_incidents, self._max_bytes)
        stays = open_folders.union(surplus)
        old = [name for name in self._outlived(newest_first) if name not in stays]
        removed = (*surplus, *old[:by_age])
        for name in removed:
            with explained(self.incidents):
                durable.remove(self.incidents / name)
        if removed:
            with explained(self.root / "owners"):
                self._sharing.unlist(frozenset(removed).__contains__)
        return removed

    def _line_in(self, name: str, file: str) -> str | None:
        """What stands in a small file of an incident; None where it has none."""
        try:
            return read_bytes(self.incidents / name / file)[:_LONGEST_OWNER].decode("utf-8", "replace")
        except StoreError:
            return None

    def _outlived(self, newest_first: list[str]) -> list[str]:
        """Those that began longer ago than the age allows, counted from a later beginning after them; oldest first."""
        old, latest = [], 0.0
        for name in newest_first:
            began = _opened_unix_seconds(name)
            if latest - began > self._max_age_seconds:
                old.append(name)
            latest = max(latest, began)
        return old[::-1]

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of `incidents/`, made if missing. Raises OSError for a link, UnsafeFolderError."""
        with durable.folder(self.root) as root:
            durable.refuse_unsafe(self.root, root)
            with durable.made_folder("incidents", root) as incidents:
                durable.refuse_unsafe(self.incidents, incidents)
                yield incidents

    def _names(self) -> list[str]:
        """Names of the incident folders, newest first; what people put beside them is not ours."""
        try:
            names = [path.name for path in self.incidents.iterdir()]
        except FileNotFoundError:
            return []
        except PermissionError:
            names = self._own_names()
        except OSError as error:
            raise StoreError(f"{self.incidents}: cannot be listed: {error.strerror}\n  try as root") from None
        return sorted(filter(_FOLDER.fullmatch, names), reverse=True)

    def _own_names(self) -> list[str]:
        """What is kept of the jobs of the user who asks."""
        try:
            return self._sharing.names_of(os.geteuid())
        except OSError as error:
            raise StoreError(f"{self.incidents}: cannot be listed: {error.strerror}\n  try as root") from None

    def _readable(self) -> list[str]:
        return [name for name in self._names() if os.access(self.incidents / name, os.R_OK | os.X_OK)]

    def _in_order(self) -> list[str]:
        """Names of the incident folders, the last saved first; the time in a name is a clock's, and clocks step."""
        return sorted(self._names(), key=lambda name: (self._order(name), name), reverse=True)

    def _order(self, name: str) -> int:
        """The how-manieth incident this was; 0 for one of before they were counted."""
        try:
            text = read_bytes(self.incidents / name / ORDER_FILE)[:20]
        except StoreError:
            return 0
        return int(text) if text.isdigit() else 0

    def _name_of(self, incident: Incident) -> str:
        """The folder of this incident; numbered where a different incident already has the name."""
        first = words.incident_name(incident.job, incident.opened_unix_seconds)
        for name in (first, *(f"{first}-{number}" for number in range(2, _SAME_NAME + 1))):
            there = incident_file.summary(self.incidents / name)
            mine = (incident.incident_id, incident.node, incident.job.job_key)
            if there.problem or (there.incident_id, there.node, there.job_key) == mine:
                return name
        raise StoreError(
            f"{self.incidents / first}: {_SAME_NAME} others have this name\n  give each node its own [store] directory"
        )


def _owner(job: Job) -> str:
    """Whose an incident is, as far as the kernel tells: the user of the node, else whose share its ranks are of."""
    uid = reader_uid(job.uid)
    return job.share or job.owner if uid is None else f"uid {uid}"


def _is_new(folder: Path, path: str) -> bool:
    return not (path.startswith("dumps/") and (folder / path).exists())


def _opened_unix_seconds(name: str) -> float:
    """The time in a folder's name; 0, older than all, for a date that does not exist."""
    try:
        return calendar.timegm(time.strptime(name[:16], "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return 0.0


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
