"""incident.json: one incident as bytes, read back by every later version, and never believed to be whole or small."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from hangwatch import __version__, words
from hangwatch.errors import UserError
from hangwatch.formats import bounded_read, decoding
from hangwatch.model import INCIDENT_VERSION, MOST_RANKS, Grouping, Incident, Job, JobState, RankId, Value, spans

INCIDENT_FILE = "incident.json"
MARKER_FILE = "marker.json"
MAX_INCIDENT_BYTES = 512 << 20  # 100,000 ranks take a fifth of it
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a FIFO must not stop us
_CAPTURES = b',"captures":['
_ENDING = re.compile(rb'"schema_version":([0-9]{1,4})\}\s*\Z')
_ENDING_BYTES = 256
_PIECE_BYTES = 64 << 10
_LISTED = 8  # jobs in a message
_MARKER_BYTES = 64 << 10
_MARKER_MESSAGE = 1024  # characters
_MARKER_RANKS = 64


class StoreError(UserError):
    """A store that cannot be used or read; the message names the path, what is wrong and what to do."""


class Summary(Value, frozen=True):
    """One line of the list of incidents.

    Where a folder cannot be read, `problem` is set and the rest is empty. Where it holds no more than a marker,
    `problem` says so, `state` is None, and the rest is what the marker tells.
    """

    folder: str
    size_bytes: int
    incident_id: str = ""
    node: str = ""
    job_id: str = ""
    job_key: str = ""
    job_name: str = ""
    opened_unix_seconds: float = 0.0
    closed_unix_seconds: float | None = None
    state: JobState | None = None
    verdict: str = ""
    message: str = ""
    problem: str = ""


class Marker(Value, frozen=True):
    """One line that is written before an incident is: all that is left of it where hangwatch ends in between.

    `ranks` are those that the verdict names, `message` is the beginning of its sentence.
    """

    incident_id: str
    node: str
    job_id: str
    job_key: str
    job_name: str
    verdict: str
    message: str
    ranks: tuple[RankId, ...]
    opened_unix_seconds: float
    hangwatch_version: str = ""


class Incidents(Value, frozen=True):
    """`hangwatch incidents --json`, and /incidents of the daemon: newest first."""

    schema_version: int
    incidents: tuple[Summary, ...]


class _JobHead(msgspec.Struct):
    job_id: str
    job_key: str = ""
    job_name: str = ""


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


def encode(incident: Incident | Marker) -> bytes:
    """The bytes of incident.json. Text that is not Unicode (a command line may hold any byte) is written escaped."""
    try:
        return msgspec.json.encode(incident)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(incident)))


def encode_marker(incident: Incident) -> bytes:
    """The bytes of the marker of an incident: one line."""
    marker = Marker(
        incident_id=incident.incident_id,
        node=incident.node,
        job_id=incident.job.job_id,
        job_key=incident.job.job_key,
        job_name=incident.job.job_name,
        verdict=incident.verdict.kind,
        message=incident.verdict.message[:_MARKER_MESSAGE],
        ranks=incident.verdict.named[:_MARKER_RANKS],
        opened_unix_seconds=incident.opened_unix_seconds,
        hangwatch_version=__version__,
    )
    return encode(marker) + b"\n"


def marker(folder: Path) -> Marker | None:
    """The marker in a folder that holds no incident; None where it holds one, or no marker that can be read."""
    if (folder / INCIDENT_FILE).exists():
        return None
    try:
        content = bounded_read.read(folder / MARKER_FILE, _MARKER_BYTES, flags=NO_LINK)
        return decode(folder / MARKER_FILE, content, Marker)
    except (bounded_read.FileError, StoreError):
        return None


def load(folder: Path) -> Incident:
    """Read the incident of one folder, of this version or an earlier one, as one of this version.

    Raises StoreError, which names the file and what to do.
    """
    if (found := marker(folder)) is not None:
        newer = "if the job still hangs, a newer incident has it: `hangwatch incidents` lists all"
        raise StoreError(f"{folder}: {_all_that_is_kept(found)}\n  {newer}")
    return parse(folder / INCIDENT_FILE, read_bytes(folder / INCIDENT_FILE))


def parse(path: Path, content: bytes) -> Incident:
    """What the file of an incident holds, as `load` reads it; `path` is for the message of StoreError."""
    version = decode(path, content, _Version)
    if version.schema_version > INCIDENT_VERSION:
        raise StoreError(
            f"{path}: was written by a newer hangwatch {version.hangwatch_version} "
            f"(schema {version.schema_version}; this one reads up to {INCIDENT_VERSION})\n  read it with that version"
        )
    if version.schema_version < 2:
        content = _with_ranges(decode(path, content, dict[str, Any]))
    try:
        incident = decode(path, content, Incident)
    except StoreError as error:
        if version.hangwatch_version in ("", __version__):
            raise
        written = f"it was written by hangwatch {version.hangwatch_version}, and this is {__version__}"
        raise StoreError(f"{error}\n  {written}: read it with that version") from None
    refuse_incredible(path, _numbers(incident))
    return replace(incident, schema_version=INCIDENT_VERSION)


def refuse_incredible(path: Path, numbers: Iterable[int | None]) -> None:
    """Raises StoreError where a number of ranks, or of one of them, is beyond belief."""
    strange = next((number for number in numbers if number is not None and abs(number) > MOST_RANKS), None)
    if strange is not None:
        raise StoreError(
            f"{path}: speaks of rank or world size {strange:,}; more than {MOST_RANKS:,} ranks are not believed\n"
            f"  such a number comes from the environment of a rank{_stacks_beside(path)}"
        )


def _numbers(incident: Incident) -> Iterator[int | None]:
    """Every number of an incident that says how many ranks there are, or which of them one is."""
    yield from numbers_of(incident.job, incident.grouping)
    yield from (taken.world_size for taken in incident.captures)
    for who in chain(
        (dump.id for taken in incident.captures for dump in taken.ranks),
        incident.verdict.named,
        incident.verdict.first_look,
    ):
        yield from (who.rank, who.local_rank)


def numbers_of(job: Job, grouping: Grouping) -> Iterator[int | None]:
    """Those that a job and its groups hold."""
    yield from (job.world_size, job.local_world_size, grouping.world_size)
    yield from (number for rank in job.ranks for number in (rank.rank, rank.local_rank))
    for group in grouping.groups:
        for member in group.members:
            yield member.id.rank
            yield member.id.local_rank


def _with_ranges(incident: dict[str, Any]) -> bytes:
    """What version 1 wrote: its absent local ranks were numbers."""
    job = incident.get("job")
    absent = job.get("absent_local_ranks") if isinstance(job, dict) else None
    if isinstance(job, dict) and isinstance(absent, list) and all(isinstance(number, int) for number in absent):
        incident["job"] = {**job, "absent_local_ranks": spans(range(number, number + 1) for number in absent)}
    return msgspec.json.encode(incident)


def read_head(file: BinaryIO) -> bytes | None:
    """What `encode` writes before the captures, as JSON of its own: a sixth of a file. None where it is another file.

    In JSON no string holds a comma before a quotation mark, so what is searched for is a key and no text of a job.
    """
    size = os.fstat(file.fileno()).st_size
    ending = _ENDING.search(os.pread(file.fileno(), _ENDING_BYTES, max(0, size - _ENDING_BYTES)))
    if size > MAX_INCIDENT_BYTES or ending is None or int(ending[1]) != INCIDENT_VERSION:
        return None
    head = b""
    while piece := file.read(_PIECE_BYTES):
        searched = max(0, len(head) - len(_CAPTURES))
        head = head + piece if head else piece
        if (end := head.find(_CAPTURES, searched)) >= 0:
            return b"".join((memoryview(head)[:end], b"}"))
    return None


def summary(folder: Path) -> Summary:
    """What a list says of the incident in a folder, read without the rest of it."""
    size_bytes = folder_size_bytes(folder)
    if (found := marker(folder)) is not None:
        return Summary(
            folder=folder.name,
            size_bytes=size_bytes,
            incident_id=found.incident_id,
            node=found.node,
            job_id=found.job_id,
            job_key=found.job_key,
            job_name=found.job_name,
            opened_unix_seconds=found.opened_unix_seconds,
            verdict=found.verdict,
            message=found.message,
            problem=_all_that_is_kept(found),
        )
    try:
        head = decode(folder / INCIDENT_FILE, read_bytes(folder / INCIDENT_FILE), _Head)
    except StoreError as error:
        return Summary(folder=folder.name, size_bytes=size_bytes, problem=str(error))
    return Summary(
        folder=folder.name,
        size_bytes=size_bytes,
        incident_id=head.incident_id,
        node=head.node,
        job_id=head.job.job_id,
        job_key=head.job.job_key,
        job_name=head.job.job_name,
        opened_unix_seconds=head.opened_unix_seconds,
        closed_unix_seconds=head.closed_unix_seconds,
        state=head.state,
        verdict=head.verdict.kind,
        message=head.verdict.message,
    )


def _all_that_is_kept(found: Marker) -> str:
    """The line that stands for an incident which was not written."""
    return f"{found.verdict}: {found.message} (hangwatch ended before it could write more than this line)"


def newest(summaries: Iterable[Summary], job: str | None, where: str) -> Summary | None:
    """The newest of these, which stand newest first; of a job by its key, id or name. None where there is none at all.

    Raises StoreError where there is none of that job, and where several jobs go by that name: users choose names.
    """
    known = [one for one in summaries if not one.problem]
    if job is None:
        return next(iter(known), None)
    found = [one for one in known if one.job_key == job] or [one for one in known if job in (one.job_id, one.job_name)]
    keys = {one.job_key: one.job_id for one in found or known}
    listed = ", ".join(f"{words.printable(name)} (key {key})" for key, name in list(keys.items())[:_LISTED])
    if known and not found:
        raise StoreError(f"--job {job}: no incident of such a job in {where}\n  jobs: {listed}")
    if found and len(keys) > 1:
        raise StoreError(f"--job {job}: {len(keys)} jobs go by this name\n  give the key of one: {listed}")
    return next(iter(found), None)


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
        return bounded_read.read(path, MAX_INCIDENT_BYTES, flags=NO_LINK)
    except bounded_read.FileError as error:
        if error.errno == errno.ENOENT:
            raise StoreError(
                f"{path}: is not there\n  `hangwatch incidents` lists the incidents of this node"
            ) from None
        raise StoreError(f"{error}{READ_REMEDIES.get(error.errno, '')}") from None


READ_REMEDIES = {
    errno.EACCES: "\n  incidents are their owner's and root's: run as root, or as who may read them",
    errno.ELOOP: "\n  it is a link, and no link is followed: name what it leads to",
}
"""What to type where the system says this of a file of an incident that is to be read."""

_T = TypeVar("_T")


def decode(path: Path, content: bytes, kind: type[_T]) -> _T:
    """The JSON of an incident as a value of this type. Raises StoreError."""
    try:
        return decoding.json(content, kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        what = f"is truncated or no incident ({error})" if content else "is empty"
        raise StoreError(f"{path}: {what}{_stacks_beside(path)}") from None


def _stacks_beside(path: Path) -> str:
    """What to type where the dumps of this incident lie beside it."""
    dumps = path.parent / "dumps"
    with contextlib.suppress(OSError):
        if dumps.is_dir():
            return f"\n  the stacks are still there: hangwatch explain {dumps}"
    return ""


def remedy(number: int | None) -> str:
    """What to do where the system says `number` (errno) as an incident is to be written."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some or lower [store] max_bytes; older incidents are untouched"
    if number in (errno.EACCES, errno.EPERM):
        return "this user may not write there: name a directory of the own ([store] directory, or -o), or run as root"
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
