"""Incident folders on disk: private, written atomically, and removed by count, bytes and age.

    <root>/incidents/20260314T031500Z-2180718/incident.json  the incident, from which all reports can be made again
                                              marker.json    one line, until incident.json exists, see `Store.mark`
                                              feedback.json  only if a person has said whether the verdict was right
                                              order          a counter: removal must not depend on the clock
                                              owner          the owner of the job, for the limits of each owner
                                              crash          only of a crash: its owner, for the limits on crashes
                                              report.txt, report.html, dumps/...   the files passed to `save`
                                              hooks/on_hung.txt                    the last output of a hook

           owners/1004/20260314T031500Z-2180718 -> ../../incidents/...  lists the incidents that user 1004 may read
           silences.json                         the jobs that do not page until a time
           lock                                  held by the daemon that writes here, contains its pid

Stacks and command lines are confidential, so folders have mode 0700 and files 0600. The daemon's store is shared: the
owner of a job, as the kernel reports it, may read the job's incidents, and a group may read all.
"""

from __future__ import annotations

import calendar
import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hangwatch import config, words
from hangwatch.formats import bounded_read, incident_file
from hangwatch.formats.incident_file import INCIDENT_FILE, MARKER_FILE, StoreError, Summary, read_bytes
from hangwatch.model import CRASHED, OPEN_STATES, Feedback, Incident, PastHang
from hangwatch.probes.base.owner_turns import order_by_turns
from hangwatch.store import access_lists, durable, retention
from hangwatch.store.durable import explain_errors
from hangwatch.store.retention import Stored
from hangwatch.store.sharing import Sharing, reader_uid
from hangwatch.store.silence_file import SilenceFile
from hangwatch.store.store_lock import Lock

log = logging.getLogger(__package__)

ORDER_FILE = "order"
OWNER_FILE = "owner"
CRASH_FILE = "crash"
FINGERPRINT = 12  # hex digits
MOST_LEFT_OPEN = 256
MOST_LEFT_OPEN_BYTES = 16 << 20  # eight ranks need about 0.5 MiB
_USUAL = config.Store()
_FOLDER = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9._-]+")
_FILE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127}/){0,3}[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SAME_NAME = 9
_LONGEST_OWNER = 512
_MOST_LISTED_NAMES = 8


def open_writable(root: Path) -> Store:
    """Return a writable store with the default limits. Raises StoreError as `Store.make_writable` does."""
    store = Store(root)
    store.make_writable()
    return store


class Store:
    """The incidents in the folder `root`. Call `make_writable` before writing. Reading needs no preparation.

    `settings` has the limits of the store and its group.
    """

    def __init__(self, root: Path, settings: config.Store = _USUAL, *, shared: bool = False) -> None:
        self.root = root
        self.incidents = root / "incidents"
        self.silences = SilenceFile(root)
        self.lock = Lock(root)
        self._sharing = Sharing(root, shared=shared, group=settings.group)
        self._settings = settings

    def left_open(self, node: str) -> tuple[Incident, ...]:
        """Return the open incidents of this node, newest first. Incidents that cannot be read are logged.

        The incidents stay in memory. So there are at most `MOST_LEFT_OPEN` incidents and `MOST_LEFT_OPEN_BYTES`,
        divided fairly between owners. Raises StoreError.
        """
        listed = [
            self.incidents / summary.folder
            for summary in self.summaries()
            if summary.node == node and summary.closed_unix_seconds is None and summary.state in OPEN_STATES
        ]
        owned = ((self._line_in(folder.name, OWNER_FILE) or "", turn) for turn, folder in enumerate(listed))
        incidents: dict[int, Incident] = {}
        skipped: list[Path] = []
        remaining_bytes = MOST_LEFT_OPEN_BYTES
        for _, turn in order_by_turns(owned):
            folder = listed[turn]
            try:
                size_bytes = (folder / INCIDENT_FILE).lstat().st_size
                if size_bytes > remaining_bytes or len(incidents) == MOST_LEFT_OPEN:
                    skipped.append(folder)
                    continue
                incidents[turn] = incident_file.check_opened_date(incident_file.load(folder), folder)
                remaining_bytes -= size_bytes
            except (OSError, StoreError) as error:
                log.warning("an open incident cannot be read: %s", error)
        if skipped:
            more = f" and {len(skipped) - 1:,} more" if len(skipped) > 1 else ""
            log.warning("%s%s: not continued: too many open incidents", skipped[0], more)
        return tuple(incidents[turn] for turn in sorted(incidents))

    def make_writable(self) -> None:
        """Make the folders, and remove temporary files of a crashed daemon.

        Raises StoreError with the remedy in these cases: nothing can be written, a link or a file is in the place
        of a folder, or other users could change the folders.
        """
        with explain_errors(self.incidents):
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            with self.opened() as incidents:
                durable.remove_leftovers(self.incidents)
                durable.prove_writable(incidents)
                self._sharing.begin(incidents)

    def mark(self, incident: Incident) -> None:
        """Write a marker: one line about an incident that will be saved. If its folder exists already, do nothing.

        `save` completes the folder. If `save` never runs, `summaries` lists the marker. Raises StoreError.
        """
        with explain_errors(self.incidents), self.opened() as incidents:
            name = self._name_of(incident)
            if not (self.incidents / name).exists():
                self._create(incidents, name, incident, {MARKER_FILE: incident_file.encode_marker(incident)})

    def save(self, incident: Incident, files: Mapping[str, str | bytes]) -> Path:
        """Write or update an incident and its other files ("report.txt", "dumps/1-3/rank7.txt"). Return its folder.

        A new folder appears complete or not at all. In an existing folder each file is replaced by rename, except
        files under `dumps/`, which never change. If there is a marker, incident.json is written last, and then the
        marker is removed. Raises StoreError (disk full, not writable). Stored files are then unchanged.
        """
        content = {
            INCIDENT_FILE: incident_file.encode(incident),
            **{name: _bytes(text) for name, text in files.items()},
        }
        for name in content:
            if not _FILE.fullmatch(name):
                raise StoreError(f"{name!r} is not a valid name for a file of an incident")
        with explain_errors(self.incidents), self.opened() as incidents:
            name = self._name_of(incident)
            folder = self.incidents / name
            is_marked = (folder / MARKER_FILE).exists()
            if folder.exists():
                kept = {path for path in content if path.startswith("dumps/") and (folder / path).exists()}
                new = {path: data for path, data in content.items() if path not in kept}
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
        """Make the folder of an incident. Let the job's owner read it, and add it to their list. Raises OSError."""
        order = 1 + max(map(self._order, self._names()), default=0)
        key, uid = incident.job.share or incident.job.owner, reader_uid(incident.job.uid)
        owner = key if uid is None else f"uid {uid}"
        all_files = {**content, OWNER_FILE: _bytes(owner), ORDER_FILE: str(order).encode()}
        if incident.verdict.kind == CRASHED:
            all_files[CRASH_FILE] = _bytes(key)
        durable.create(incidents, name, all_files, self._sharing.owner_and_group(incident.job.uid))
        self._sharing.enlist(name, incident.job.uid)

    def add_output(self, name: str, file_name: str, content: bytes) -> None:
        """Add the output of a hook to an incident. The job's owner has no right to read it. Raises StoreError."""
        allow = self._sharing.group()
        with explain_errors(self.incidents), self.opened() as incidents, durable.folder(name, incidents) as folder:
            durable.refuse_unsafe(self.incidents / name, folder)
            durable.add(folder, "hooks", {file_name: content}, allow)

    def save_feedback(self, name: str, feedback: Feedback) -> None:
        """Write or replace the feedback on an incident. It has the same readers. Raises StoreError."""
        with explain_errors(self.incidents), self.opened() as incidents, durable.folder(name, incidents) as folder:
            durable.refuse_unsafe(self.incidents / name, folder)
            incident = os.open(INCIDENT_FILE, os.O_RDONLY | os.O_CLOEXEC | incident_file.NO_LINK, dir_fd=folder)
            try:
                content = incident_file.encode(feedback)
                allow = partial(access_lists.copy_readers, incident)
                durable.replace_file(folder, incident_file.FEEDBACK_FILE, content, allow)
            finally:
                os.close(incident)
            os.fsync(folder)

    def has_member(self, gids: Collection[int]) -> bool:
        """True if a user of these groups is a member of [store] group."""
        return self._sharing.has_member(gids)

    def is_listed(self, name: str, uid: int) -> bool:
        """True if the list of this user has the incident, so that the user may read it as the owner of its job."""
        return bool(_FOLDER.fullmatch(name)) and self._sharing.is_listed(name, uid)

    def summaries(self, of_user: int | None = None) -> tuple[Summary, ...]:
        """Return the incidents that the caller may read, newest first. Raises StoreError.

        Incidents that are broken are included. With `of_user`, only the incidents of this user's jobs are returned.
        """
        names = (name for name in self._readable() if of_user is None or self.is_listed(name, of_user))
        return tuple(incident_file.load_summary(self.incidents / name) for name in names)

    def past_hangs(self) -> tuple[PastHang, ...]:
        """Return the hangs in the store, newest first. Raises StoreError."""
        hung = (summary for summary in self.summaries() if summary.has_hung and not summary.problem)
        return tuple(PastHang.copy_from(summary) for summary in hung if len(summary.fingerprint) <= FINGERPRINT)

    def find(self, name: str) -> Path:
        """Return the folder of an incident, by its name or a unique part of the name. Raises StoreError."""
        names = self._readable()
        matches = [name] if name in names else [other for other in names if name in other]
        if len(matches) == 1:
            return self.incidents / matches[0]
        problem = f"matches {len(matches)} incidents" if matches else "matches no incident"
        listed = ", ".join((matches or names)[:_MOST_LISTED_NAMES]) or "none that you may read"
        raise StoreError(
            f"{name!r} {problem} in {self.incidents}\n  newest first: {listed}; `hangwatch incidents` lists all"
        )

    def newest(self, job: str | None = None) -> Path | None:
        """Return the folder of the newest readable incident; with `job` (key, id or name), of the newest of that job.

        None if there is no incident at all. Raises StoreError if this job has no incident, or if several jobs have
        this name.
        """
        if job is None:
            return next((self.incidents / name for name in self._readable()), None)
        summary = incident_file.find_newest(self.summaries(), job, str(self.incidents))
        return self.incidents / summary.folder if summary is not None else None

    def open_file(self, incident_id: str, name: str) -> BinaryIO | None:
        """Open a file of the incident with this folder name; None if the file does not exist. No link is followed."""
        if not (_FOLDER.fullmatch(incident_id) and _FILE.fullmatch(name)):
            return None
        try:
            return bounded_read.open_below(self.root, self.incidents / incident_id / name)
        except bounded_read.FileError:
            return None

    def prune(self, open_folders: frozenset[str] = frozenset(), *, by_age: int = 0) -> tuple[str, ...]:
        """Remove incidents over the limits, see `retention`, but never `open_folders`. Return their names.

        At most `by_age` further incidents are removed because of their age: after a jump of the clock by a month,
        not all of them must be lost. Raises StoreError if a folder cannot be removed.
        """
        # The last saved one is first. The times in the names may be wrong.
        newest_first = sorted(self._names(), key=lambda name: (self._order(name), name), reverse=True)
        stored = [
            Stored(
                name=name,
                owner=self._line_in(name, OWNER_FILE) or "",
                size_bytes=incident_file.folder_size_bytes(self.incidents / name),
                is_open=name in open_folders,
                crash_of=self._line_in(name, CRASH_FILE),
            )
            for name in newest_first
        ]
        surplus = retention.surplus(stored, self._settings.max_incidents, self._settings.max_bytes)
        old = [name for name in self._outlived(newest_first) if name not in open_folders.union(surplus)]
        removed = (*surplus, *old[:by_age])
        for name in removed:
            with explain_errors(self.incidents):
                durable.remove(self.incidents / name)
        if removed:
            with explain_errors(self.root / "owners"):
                self._sharing.unlist(frozenset(removed).__contains__)
        return removed

    def _line_in(self, name: str, file: str) -> str | None:
        """Return the content of a small file in the folder of an incident; None if it does not exist."""
        try:
            return read_bytes(self.incidents / name / file)[:_LONGEST_OWNER].decode("utf-8", "replace")
        except StoreError:
            return None

    def _outlived(self, newest_first: list[str]) -> list[str]:
        """Return the names of the incidents that are too old, the oldest first.

        The age of an incident is the time from its beginning to the beginning of the newest incident.
        """
        old, latest = [], 0.0
        for name in newest_first:
            began = _opened_unix_seconds(name)
            if latest - began > self._settings.max_age_days * 86400.0:
                old.append(name)
            latest = max(latest, began)
        return old[::-1]

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open the folder `incidents/`, or make it. Raises OSError, also for a link, and UnsafeFolderError."""
        with durable.folder(self.root) as root:
            durable.refuse_unsafe(self.root, root)
            with durable.made_folder("incidents", root) as incidents:
                durable.refuse_unsafe(self.incidents, incidents)
                yield incidents

    def _names(self) -> list[str]:
        """Return the names of the incident folders, newest first. Other files are ignored."""
        try:
            names = self._list()
        except OSError as error:
            raise StoreError(f"{self.incidents}: cannot be listed: {error.strerror}\n  try as root") from None
        return sorted(filter(_FOLDER.fullmatch, names), reverse=True)

    def _list(self) -> list[str]:
        """Return the names in the folder; if this user may not list it, those of the incidents of this user's jobs."""
        try:
            return [path.name for path in self.incidents.iterdir()]
        except FileNotFoundError:
            return []
        except PermissionError:
            return self._sharing.names_of(os.geteuid())

    def _readable(self) -> list[str]:
        return [name for name in self._names() if os.access(self.incidents / name, os.R_OK | os.X_OK)]

    def _order(self, name: str) -> int:
        """Return the counter in the folder of an incident; 0 for an incident of an earlier version, which has none."""
        text = self._line_in(name, ORDER_FILE) or ""
        return int(text) if text.isascii() and text.isdecimal() else 0

    def _name_of(self, incident: Incident) -> str:
        """Return the folder name of an incident. If another incident has this name already, a number is added."""
        first = words.incident_name(incident.job, incident.opened_unix_seconds)
        identity = (incident.incident_id, incident.node, incident.job.job_key)
        for name in (first, *(f"{first}-{number}" for number in range(2, _SAME_NAME + 1))):
            summary = incident_file.load_summary(self.incidents / name)
            if summary.problem or (summary.incident_id, summary.node, summary.job_key) == identity:
                return name
        raise StoreError(
            f"{self.incidents / first}: {_SAME_NAME} other incidents have this name\n"
            "  give each node its own [store] directory"
        )


def _opened_unix_seconds(name: str) -> float:
    """Return the time in the name of a folder in Unix seconds; 0 for an invalid date."""
    try:
        return calendar.timegm(time.strptime(name[:16], "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return 0.0


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
