"""incident.json: one incident as bytes, read back by every later version, and never believed to be whole or small."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from hangwatch import inputs, words
from hangwatch.model import INCIDENT_VERSION, MOST_RANKS, Incident, JobState, Value, spans

INCIDENT_FILE = "incident.json"
MAX_INCIDENT_BYTES = 512 << 20  # 100,000 ranks take a fifth of it
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a FIFO must not stop us


class StoreError(Exception):
    """A store that cannot be used or read; the message names the path, what is wrong and what to do."""


class Summary(Value, frozen=True):
    """One line of the list of incidents. Where a folder cannot be read, `problem` is set and the rest is empty."""

    folder: str
    size_bytes: int
    incident_id: str = ""
    node: str = ""
    job_id: str = ""
    job_key: str = ""
    opened_unix_seconds: float = 0.0
    closed_unix_seconds: float | None = None
    state: JobState | None = None
    verdict: str = ""
    message: str = ""
    problem: str = ""


class _JobHead(msgspec.Struct):
    job_id: str
    job_key: str = ""


class _VerdictHead(msgspec.Struct):
    kind: str
    message: str


class _Head(msgspec.Struct):
    """The fields of incident.json that a list needs; the decoder skips the rest."""

    incident_id: str
    node: str
    job: _JobHead
    opened_unix_seconds: float
    state: JobState
    verdict: _VerdictHead
    closed_unix_seconds: float | None = None


class _Version(msgspec.Struct):
    schema_version: int = INCIDENT_VERSION
    hangwatch_version: str = "of unknown version"


def encode(incident: Incident) -> bytes:
    """The bytes of incident.json. Text that is not Unicode (a command line may hold any byte) is written escaped."""
    try:
        return msgspec.json.encode(incident)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(incident)))


def load(folder: Path) -> Incident:
    """Read the incident of one folder, of this version or an earlier one, as one of this version.

    Raises StoreError, which names the file and what to do.
    """
    path = folder / INCIDENT_FILE
    content = read_bytes(path)
    version = _decode(path, content, _Version)
    if version.schema_version > INCIDENT_VERSION:
        raise StoreError(
            f"{path}: was written by a newer hangwatch {version.hangwatch_version} "
            f"(schema {version.schema_version}; this one reads up to {INCIDENT_VERSION})\n  read it with that version"
        )
    if version.schema_version < 2:
        content = _with_ranges(_decode(path, content, dict[str, Any]))
    incident = _decode(path, content, Incident)
    strange = next((number for number in _numbers(incident) if number is not None and abs(number) > MOST_RANKS), None)
    if strange is not None:
        raise StoreError(
            f"{path}: speaks of rank or world size {strange:,}; more than {MOST_RANKS:,} ranks are not believed\n"
            "  such a number comes from the environment of a rank; the stacks can still be read:\n"
            f"  hangwatch explain {path.parent / 'dumps'}"
        )
    return replace(incident, schema_version=INCIDENT_VERSION)


def _numbers(incident: Incident) -> Iterator[int | None]:
    """Every number of an incident that says how many ranks there are, or which of them one is."""
    yield from (incident.job.world_size, incident.job.local_world_size, incident.grouping.world_size)
    yield from (taken.world_size for taken in incident.captures)
    yield from (number for rank in incident.job.ranks for number in (rank.rank, rank.local_rank))
    for who in chain(
        (member.id for member in incident.grouping.members),
        (dump.id for taken in incident.captures for dump in taken.ranks),
        incident.verdict.named,
        incident.verdict.first_look,
    ):
        yield from (who.rank, who.local_rank)


def _with_ranges(incident: dict[str, Any]) -> bytes:
    """What version 1 wrote: its absent local ranks were numbers."""
    job = incident.get("job")
    absent = job.get("absent_local_ranks") if isinstance(job, dict) else None
    if isinstance(job, dict) and isinstance(absent, list) and all(isinstance(number, int) for number in absent):
        incident["job"] = {**job, "absent_local_ranks": spans(range(number, number + 1) for number in absent)}
    return msgspec.json.encode(incident)


def summary(folder: Path) -> Summary:
    """What a list says of the incident in a folder, read without the rest of it."""
    size_bytes = folder_size_bytes(folder)
    try:
        head = _decode(folder / INCIDENT_FILE, read_bytes(folder / INCIDENT_FILE), _Head)
    except StoreError as error:
        return Summary(folder=folder.name, size_bytes=size_bytes, problem=str(error))
    return Summary(
        folder=folder.name,
        size_bytes=size_bytes,
        incident_id=head.incident_id,
        node=head.node,
        job_id=head.job.job_id,
        job_key=head.job.job_key,
        opened_unix_seconds=head.opened_unix_seconds,
        closed_unix_seconds=head.closed_unix_seconds,
        state=head.state,
        verdict=head.verdict.kind,
        message=head.verdict.message,
    )


def of_some_day(incident: Incident, folder: Path) -> Incident:
    """An incident that can be saved again. Raises StoreError for one of a year that has no name."""
    try:
        words.incident_name(incident.job, incident.opened_unix_seconds)
    except ValueError:
        raise StoreError(
            f"{folder / INCIDENT_FILE}: was opened at {incident.opened_unix_seconds:g} s, in no year"
        ) from None
    return incident


def folder_size_bytes(folder: Path) -> int:
    """Bytes of all files below; what disappears meanwhile counts nothing, and no link is followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(base, name).lstat().st_size
    return total


def read_bytes(path: Path) -> bytes:
    """A file of an incident's folder, within bounds and through no link. Raises StoreError."""
    try:
        return inputs.read(path, MAX_INCIDENT_BYTES, flags=NO_LINK)
    except inputs.FileError as error:
        if error.errno == errno.ENOENT:
            raise StoreError(
                f"{path}: is not there\n  `hangwatch incidents` lists the incidents of this node"
            ) from None
        raise StoreError(f"{error}\n  {remedy(error.errno, path)}") from None


_T = TypeVar("_T")


def _decode(path: Path, content: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        what = f"is truncated or no incident ({error})" if content else "is empty"
        raise StoreError(
            f"{path}: {what}\n  the stacks may still be there: hangwatch explain {path.parent / 'dumps'}"
        ) from None


def remedy(number: int | None, path: Path) -> str:
    """What to do where the system says `number` (errno) of a path in the store."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some or lower [store] max_bytes; older incidents are untouched"
    if number in (errno.EACCES, errno.EPERM):
        return f"run as root, or give the daemon's user the directory: chown -R USER {path.parent}"
    if number == errno.EROFS:
        return "the file system is read-only: set [store] directory (under systemd: StateDirectory=hangwatch)"
    if number in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        return "a link or a file is in the place of a folder: move it away, hangwatch follows no links there"
    return "set [store] directory to a local directory that works"


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
