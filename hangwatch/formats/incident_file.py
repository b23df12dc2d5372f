"""The file incident.json: one incident, in the form of this version. Its size and content are not trusted."""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import structs

from hangwatch import __version__, words
from hangwatch.errors import UserError
from hangwatch.formats import bounded_read, decoding
from hangwatch.limits import MOST_RANKS
from hangwatch.model import (
    CRASHED,
    INCIDENT_VERSION,
    Feedback,
    Grouping,
    Incident,
    Job,
    JobState,
    PastHang,
    RecommendedAction,
    Value,
)

INCIDENT_FILE = "incident.json"
MARKER_FILE = "marker.json"
FEEDBACK_FILE = "feedback.json"
MAX_INCIDENT_BYTES = 512 << 20  # 100,000 ranks take a fifth of this
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a FIFO must not block hangwatch
_CAPTURES = b',"captures":['
_ANSWER = re.compile(rb'\s*\{\s*"schema_version":\s*\d+,\s*"node":')
_ENDING = re.compile(rb'"schema_version":([0-9]{1,4})\}\s*\Z')
_ENDING_BYTES = 256
_T = TypeVar("_T")
PIECE_BYTES = 64 << 10
_LISTED = 8  # jobs in a message
_MARKER_BYTES = 64 << 10
_FEEDBACK_BYTES = 4 << 20  # it contains the named ranks
_MARKER_MESSAGE = 1024  # characters


class StoreError(UserError):
    """A store that cannot be used or read. The message names the path, the problem and the remedy."""


class Summary(PastHang, frozen=True, kw_only=True):
    """One incident in a list of incidents.

    If the folder cannot be read, `problem` is set and the rest is empty. If the folder has only a marker, `problem`
    says so, `state` is None, and the other fields come from the marker. `uid` is the user id of its job.
    `has_hung`: its job was in the state hung. `is_named`: the verdict names a rank.
    """

    folder: str
    size_bytes: int
    job_id: str = ""
    job_key: str = ""
    job_name: str = ""
    closed_unix_seconds: float | None = None
    state: JobState | None = None
    verdict: str = ""
    message: str = ""
    has_hung: bool = False
    is_named: bool = False
    feedback: Feedback | None = None
    problem: str = ""


class Incidents(Value, frozen=True):
    """The incidents of a node, newest first: for `hangwatch incidents --json` and the daemon's /incidents."""

    schema_version: int
    incidents: tuple[Summary, ...]


class _JobHead(msgspec.Struct):
    job_id: str
    job_key: str = ""
    job_name: str = ""
    uid: int | None = None


class _VerdictHead(msgspec.Struct):
    kind: str
    message: str
    named: tuple[object, ...] = ()
    action: RecommendedAction = RecommendedAction()
    fingerprint: str = ""


class _TimelineHead(msgspec.Struct):
    state: str


class _Head(msgspec.Struct):
    """The fields of incident.json that a list of incidents shows. The decoder skips the rest."""

    incident_id: str
    node: str
    job: _JobHead
    opened_unix_seconds: float
    state: JobState
    verdict: _VerdictHead
    timeline: tuple[_TimelineHead, ...] = ()
    closed_unix_seconds: float | None = None


class _Version(msgspec.Struct):
    schema_version: int = INCIDENT_VERSION
    hangwatch_version: str = ""


def encode(incident: Incident | Summary | Feedback) -> bytes:
    """Return an incident as JSON. Text that is not Unicode is escaped, because a command line may contain any byte."""
    try:
        return msgspec.json.encode(incident)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(incident)))


def encode_marker(incident: Incident) -> bytes:
    """Return the marker of an incident: one line of JSON, which is written before it and removed after it.

    It remains only if hangwatch ends before it has written the incident. It is a summary without a state, with the
    beginning of the verdict's sentence.
    """
    summary = Summary.copy_from(
        incident,
        incident.job,
        folder="",
        size_bytes=0,
        state=None,
        verdict=incident.verdict.kind,
        message=incident.verdict.message[:_MARKER_MESSAGE],
    )
    return encode(summary) + b"\n"


def load_marker(folder: Path) -> Summary | None:
    """Return the marker in a folder; None if the folder has an incident, or no readable marker."""
    has_incident = (folder / INCIDENT_FILE).exists()
    return None if has_incident else _load_small(folder / MARKER_FILE, _MARKER_BYTES, Summary)


def load_feedback(folder: Path) -> Feedback | None:
    """Return the feedback on the incident in a folder; None if there is no readable feedback."""
    return _load_small(folder / FEEDBACK_FILE, _FEEDBACK_BYTES, Feedback)


def _load_small(path: Path, most_bytes: int, kind: type[_T]) -> _T | None:
    """Return the value in a file beside an incident; None if it cannot be read."""
    try:
        return decode(path, bounded_read.read(path, most_bytes, flags=NO_LINK), kind)
    except (bounded_read.FileError, StoreError):
        return None


def load(folder: Path) -> Incident:
    """Read the incident in a folder. Raises StoreError, which names the file and the remedy."""
    if (kept := load_marker(folder)) is not None:
        newer = "if the job still hangs, there is a newer incident: `hangwatch incidents` lists all"
        raise StoreError(f"{folder}: {_marker_line(kept)}\n  {newer}")
    return parse(folder / INCIDENT_FILE, read_bytes(folder / INCIDENT_FILE))


def parse(path: Path, content: bytes) -> Incident:
    """Parse the content of an incident file, as `load` does. Raises StoreError, which names `path`."""
    if is_answer(content):
        remedy = f"to read it: `hangwatch explain {path}` (with --grouped: `hangwatch merge {path}`)"
        raise StoreError(f"{path}: is the output of `hangwatch dump --json`\n  {remedy}")
    version = decode(path, content, _Version)
    if version.schema_version != INCIDENT_VERSION:
        raise StoreError(
            f"{path}: was written by hangwatch {version.hangwatch_version or 'of unknown version'} "
            f"in form {version.schema_version}; "
            f"this hangwatch ({__version__}) reads form {INCIDENT_VERSION}\n  read it with that version"
        )
    try:
        incident = decode(path, content, Incident)
    except StoreError as error:
        if version.hangwatch_version in ("", __version__):
            raise
        written = f"it was written by hangwatch {version.hangwatch_version}, and this is {__version__}"
        raise StoreError(f"{error}\n  {written}: read it with that version") from None
    check_rank_numbers(path, _numbers(incident))
    return incident


def is_answer(content: bytes) -> bool:
    """True if this is the output of `hangwatch dump --json`, or its first bytes."""
    return _ANSWER.match(content) is not None


def check_rank_numbers(path: Path, numbers: Iterable[int | None]) -> None:
    """Raise StoreError if a rank number or world size exceeds MOST_RANKS."""
    excessive = next((number for number in numbers if number is not None and abs(number) > MOST_RANKS), None)
    if excessive is not None:
        raise StoreError(
            f"{path}: rank or world size is {excessive:,}; at most {MOST_RANKS:,} ranks are accepted\n"
            f"  such a number comes from the environment of a rank{_dumps_remedy(path)}"
        )


def _numbers(incident: Incident) -> Iterator[int | None]:
    """Yield every rank number and world size of an incident."""
    yield from rank_numbers(incident.job, incident.grouping)
    yield from (capture.world_size for capture in incident.captures)
    for rank_id in chain(
        (dump.id for capture in incident.captures for dump in capture.ranks),
        incident.verdict.named,
        incident.verdict.check_first,
    ):
        yield from (rank_id.rank, rank_id.local_rank)


def rank_numbers(job: Job, grouping: Grouping) -> Iterator[int | None]:
    """Yield every rank number and world size of a job and its groups."""
    yield from (job.world_size, job.local_world_size, grouping.world_size)
    yield from (number for rank in job.ranks for number in (rank.rank, rank.local_rank))
    yield from (number for member in grouping.members for number in (member.id.rank, member.id.local_rank))


def read_head(file: BinaryIO) -> bytes | None:
    """Return the part of an incident before its captures, about a sixth of the file, as JSON.

    None if the file is not an incident of this version. The search for the key of the captures cannot match text of
    a job, because in a JSON string a quotation mark is escaped.
    """
    size = os.fstat(file.fileno()).st_size
    ending = _ENDING.search(os.pread(file.fileno(), _ENDING_BYTES, max(0, size - _ENDING_BYTES)))
    if size > MAX_INCIDENT_BYTES or ending is None or int(ending[1]) != INCIDENT_VERSION:
        return None
    head = b""
    while piece := file.read(PIECE_BYTES):
        searched = max(0, len(head) - len(_CAPTURES))
        head = head + piece if head else piece
        if (end := head.find(_CAPTURES, searched)) >= 0:
            return b"".join((memoryview(head)[:end], b"}"))
    return None


def load_summary(folder: Path) -> Summary:
    """Return the summary of the incident in a folder. Most of the file is not decoded."""
    size_bytes = folder_size_bytes(folder)
    if (kept := load_marker(folder)) is not None:
        return structs.replace(kept, folder=folder.name, size_bytes=size_bytes, problem=_marker_line(kept))
    try:
        head = decode(folder / INCIDENT_FILE, read_bytes(folder / INCIDENT_FILE), _Head)
    except StoreError as error:
        return Summary(folder=folder.name, size_bytes=size_bytes, problem=str(error))
    return Summary.copy_from(
        head,
        head.job,
        head.verdict,
        folder=folder.name,
        size_bytes=size_bytes,
        verdict=head.verdict.kind,
        action=head.verdict.action.kind,
        has_hung=any(line.state == JobState.HUNG.value for line in head.timeline) or head.verdict.kind == CRASHED,
        is_named=bool(head.verdict.named),
        feedback=load_feedback(folder),
    )


def _marker_line(kept: Summary) -> str:
    """Return a sentence about an incident that has only its marker, without a report."""
    return f"{kept.verdict}: {kept.message} (hangwatch ended before it could write more than this line)"


def find_newest(summaries: Iterable[Summary], job: str | None, where: str) -> Summary | None:
    """Return the newest incident; None if there are no incidents.

    With `job` (key, id or name), return the newest incident of that job. `summaries` are newest first. Raises
    StoreError if that job has no incident, or if several jobs have this name, which is possible because users
    choose names.
    """
    readable = [summary for summary in summaries if not summary.problem]
    if job is None:
        return next(iter(readable), None)
    matching = [summary for summary in readable if summary.job_key == job] or [
        summary for summary in readable if job in (summary.job_id, summary.job_name)
    ]
    keys = {summary.job_key: summary.job_id for summary in matching or readable}
    listed = ", ".join(f"{words.printable(name)} (key {key})" for key, name in list(keys.items())[:_LISTED])
    if readable and not matching:
        raise StoreError(f"--job {job}: no incident of such a job in {where}\n  jobs: {listed}")
    if matching and len(keys) > 1:
        raise StoreError(f"--job {job}: {len(keys)} jobs have this name\n  give the key of one: {listed}")
    return next(iter(matching), None)


def check_opened_date(incident: Incident, folder: Path) -> Incident:
    """Return the incident. Raises StoreError if it cannot be saved again because its date is out of range."""
    try:
        words.incident_name(incident.job, incident.opened_unix_seconds)
    except ValueError:
        raise StoreError(
            f"{folder / INCIDENT_FILE}: opened at {incident.opened_unix_seconds:g} s, which is not a valid date"
        ) from None
    return incident


def folder_size_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder, except links and files that disappear meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(base, name).lstat().st_size
    return total


def read_bytes(path: Path) -> bytes:
    """Return the content of a file in an incident's folder. Links are not followed. Raises StoreError."""
    try:
        return bounded_read.read(path, MAX_INCIDENT_BYTES, flags=NO_LINK)
    except bounded_read.FileError as error:
        if error.errno == errno.ENOENT:
            raise StoreError(
                f"{path}: does not exist\n  `hangwatch incidents` lists the incidents of this node; "
                f"stack dumps and logs: `hangwatch explain {path.parent}`"
            ) from None
        raise StoreError(f"{error}{READ_REMEDIES.get(error.errno, '')}") from None


READ_REMEDIES = {
    errno.EACCES: "\n  only root and the owner may read incidents: run as root, or as a user who may read them",
    errno.ELOOP: "\n  it is a link, and links are not followed: give the path of its target",
}
"""The remedy for each errno of reading an incident."""


def decode(path: Path, content: bytes, kind: type[_T]) -> _T:
    """Decode a JSON file of an incident to a value of this type. Raises StoreError."""
    try:
        return decoding.decode_json(content, kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        what = f"is truncated or not an incident ({error})" if content else "is empty"
        is_other = content.strip() and path.name != INCIDENT_FILE
        hint = f"\n  stack dumps and logs: hangwatch explain {path}" if is_other else _dumps_remedy(path)
        raise StoreError(f"{path}: {what}{hint}") from None


def _dumps_remedy(path: Path) -> str:
    """Return a line with the command that reads the dumps of this incident; "" if it has no dumps."""
    dumps = path.parent / "dumps"
    with contextlib.suppress(OSError):
        if dumps.is_dir():
            return f"\n  the stacks are still there: hangwatch explain {dumps}"
    return ""


def write_remedy(number: int | None) -> str:
    """Return the remedy for an error in writing an incident, by its errno."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free space or lower [store] max_bytes; older incidents are untouched"
    if number in (errno.EACCES, errno.EPERM):
        return "this user may not write there: set a directory of this user ([store] directory, or -o), or run as root"
    if number == errno.EROFS:
        return "the file system is read-only: set [store] directory (under systemd: StateDirectory=hangwatch)"
    if number in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        return "a link or a file is in the place of a folder: move it away; hangwatch does not follow links there"
    return "set [store] directory to a local directory that works"


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
