"""A verdict from the stack dumps and logs in files and folders, printed by `hangwatch explain`."""

import bz2
import codecs
import contextlib
import gc
import gzip
import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import click
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli import progress_line
from hangwatch.cli.progress_line import Step
from hangwatch.cli.usage_errors import InputError
from hangwatch.collectives.rank_records import drop_unneeded
from hangwatch.config import Settings
from hangwatch.formats import bounded_read, incident_file
from hangwatch.logs import kernel_text, log_evidence
from hangwatch.model import Grouping, Incident, Job, Supplement, Verdict
from hangwatch.report import as_json
from hangwatch.stacks.activity import load as load_activities
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tables.environment_names import WILD
from hangwatch.tools.commands.output import print_answer
from hangwatch.tools.commands.output_files import MOST_FILES, files_below
from hangwatch.tools.explain import traces
from hangwatch.tools.explain.flight_dumps import rank_recorders, recorder_dump, stopped_launch
from hangwatch.verdict import judge, recorder_dumps
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.supplements import complete

LONGEST_LINE_BYTES = 16 << 20  # `py-spy dump --json` may print one line
MOST_BYTES = 4 << 30  # of one file or of standard input
MOST_INCIDENTS = 64  # in one folder; all together have at most MAX_INCIDENT_BYTES
SNIFFED_BYTES = 8 << 10
_UNPACKERS: dict[bytes, Callable[[BinaryIO], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open, b"BZh": bz2.open}
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)  # or cut, or a file that cannot be read
_ZSTD, _ZIP = b"\x28\xb5\x2f\xfd", b"PK\x03\x04"  # a zip is also the beginning of a checkpoint of torch
_TAR, _TAR_AT = b"ustar", 257  # tar(5)
_HTML, _OF_REPORT = b"<!doctype html>", b'<meta name="generator" content="hangwatch">'
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MOST_NAMED_FILES = 8
_SOURCE_CODE = (".py", ".pyi", ".ipynb", ".sh", ".js", ".ts", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_JOB_FOLDER = re.compile(r"(?:job|run|exp|experiment|trial|slurm)[-_.]?\w{1,64}|\d{4,12}", re.IGNORECASE | re.ASCII)

_Kind = Literal["recorder", "dumped", "text", "empty", "compressed", "report", "other", "closed"]
FileBelow = tuple[Path, Path | None]  # a path, and the folder argument that contains it; None: the path is an argument


def explain_paths(
    paths: tuple[Path, ...], world_size: int | None, settings: Settings, *, as_json_form: bool, html_path: Path | None
) -> None:
    """Print the verdict on each job in these paths. Raises click.UsageError and InputError."""
    jobs = _part_jobs(paths)
    if html_path is not None and len(jobs) > 1:
        raise click.UsageError(f"{paths[0]} has the files of several jobs: give one of its folders for a page")
    for paths_of_job in jobs:
        with progress_line.shown() as now:
            answer = _answer(paths_of_job, world_size, settings, now)
        if len(jobs) > 1 and not as_json_form:
            click.echo(f"\n{words.printable(str(paths_of_job[0]))}\n")
        print_answer(*answer, as_json_form, html_path)


def _part_jobs(paths: tuple[Path, ...]) -> list[tuple[Path, ...]]:
    """Return the paths of each job. A folder has several if its folders are called `job-7`, with equal files of ranks.

    torchrun's folders of runs may be the nodes of one job.
    """
    folder = paths[0]
    if len(paths) > 1 or not folder.is_dir():
        return [paths]
    try:
        parts = sorted(folder.iterdir())
    except OSError:  # reported with the files that cannot be read
        return [paths]
    if len(parts) < 2 or any(part.is_symlink() or not _JOB_FOLDER.fullmatch(part.name) for part in parts):
        return [paths]
    files = [{path.relative_to(part) for path in files_below(part, _may_be_evidence, [])} for part in parts]
    of_ranks = [path for path in set.intersection(*files) if "rank" in path.name.lower()]
    return [(part,) for part in parts] if len(of_ranks) > 1 else [paths]


def _answer(
    paths: Sequence[Path], world_size: int | None, settings: Settings, now: Step
) -> tuple[Grouping, Verdict, Job | None]:
    """Return the groups, the verdict and the job from all files. Raises InputError if no file has a stack or a log.

    The job is None unless a file is an incident.
    """
    gc.disable()  # stacks have no reference cycles, and garbage collection takes a third of the time for many ranks
    now.say("looking for files")
    files, incidents, about_incidents = _sort(paths)
    looked_at = now.each([path for path, _ in files], len(files), "looking at")
    kinds = {path: _kind(path, folder) for path, (_, folder) in zip(looked_at, files, strict=True)}
    texts = [(path, folder) for path, folder in files if kinds[path] in ("text", "empty")]
    notes: list[str] = []
    named_lines = (
        (str(path), _lines(path, folder, now, f"reading {number:,} of {len(texts):,}: ", notes))
        for number, (path, folder) in enumerate(texts, 1)
    )
    collected = traces.collect(named_lines, world_size)
    recorders, refused = _flight_dumps([(path, folder) for path, folder in files if kinds[path] == "recorder"], now)
    now.say(f"comparing {words.count(len(collected.ranks), 'rank')}")
    answers = _of_dumps([(path, folder) for path, folder in files if kinds[path] == "dumped"], incidents)
    notes += [*refused, *about_incidents, *_left_out(kinds)]
    collected = collected._replace(notes=(*recorders.notes, *collected.notes, *notes))
    dumps = [*collected.ranks, *(rank for incident in incidents for rank in incident.captures[-1].ranks)]
    dumps += [rank for answer in answers for rank in (answer.capture.ranks if answer.capture else ())]
    dumps += recorder_dumps.without_stacks(recorders.by_rank, dumps, recorders.world_size)
    if not any((dumps, collected.logs, collected.works, collected.unranked, collected.kernel)):
        listed = "".join(f"\n  {note}" for note in collected.notes[:5])
        raise InputError(
            f"no stack dump and no log of a known rank in {', '.join(map(str, paths))}{listed}\n"
            "  live process: `py-spy dump --pid PID > rank0.txt`; core file: `pystack core FILE > rank0.txt`\n"
            "  job that has ended: the logs of all ranks, and torch's recorder dumps (comm_lib_trace_rank_*)"
        )
    sizes = [incident.job.world_size or 0 for incident in incidents] + [answer.world_size or 0 for answer in answers]
    size = collected.world_size or max(sizes, default=0) or recorders.world_size
    grouping = group_ranks(dumps, load_activities(settings.activities.rules), settings.capture, size or None)
    grouping = replace(grouping, notes=(*grouping.notes, *collected.notes))
    grouping = recorder_dumps.with_records(grouping, recorders.by_rank)
    job = incidents[0].job if incidents else None
    ranks_here = incidents[0].job.ranks_here or None if len(incidents) == 1 and not files else None
    verdict = judge.judge(grouping, ranks_here, recorders.by_rank) if dumps else None
    if verdict is not None and recorders.by_rank:
        verdict = complete(verdict, Supplement(evidence=recorders.evidence))
        verdict = complete(verdict, stopped_launch.supplement(recorders.by_rank))
    ids = [member.id for member in grouping.members]
    of_kernel = kernel_text.supplement(collected.kernel, ids) if collected.kernel else Supplement()
    if verdict is None and collected.kernel and not (collected.logs or collected.works):
        verdict, of_kernel = complete(verdict, of_kernel), Supplement()
    if collected.logs or collected.works or collected.unranked:
        of_logs = log_evidence.supplement(collected.logs, collected.works, size or None, collected.unranked)
        verdict = complete(verdict, of_logs)
    return grouping, with_action(complete(verdict, of_kernel), grouping), job


def _of_dumps(files: Iterable[FileBelow], incidents: Iterable[Incident]) -> list[as_json.Answer]:
    """Read files with the output of `hangwatch dump --json`, and return the answer about each dumped job.

    All answers and `incidents` must be about one job. Raises InputError for several jobs or another schema version.
    """
    dumped: list[as_json.Answer] = []
    for path, folder in files:
        try:
            with _opened(path, folder) as file:
                content = bounded_read.read_rest(file, path, incident_file.MAX_INCIDENT_BYTES)
        except bounded_read.FileError as error:
            raise InputError(str(error)) from None
        except _DAMAGED as error:
            raise InputError(f"{path}: {error}") from None
        answers = incident_file.decode(path, content, as_json.Dump).jobs
        for answer in answers:
            ranks = answer.capture.ranks if answer.capture is not None else ()
            numbers = (number for rank in ranks for number in (rank.id.rank, rank.id.local_rank))
            incident_file.check_rank_numbers(path, [answer.world_size, *numbers])
        dumped += answers
    jobs = {answer.job.job_key: f"{answer.job.job_id} ({answer.job.owner})" for answer in dumped if answer.job}
    jobs |= {incident.job.key: incident.job.job_id for incident in incidents if dumped}
    if len(jobs) > 1:
        raise InputError(
            f"these dumps are of several jobs: {', '.join(sorted(jobs.values()))}\n"
            "  dump one job at a time: `hangwatch dump --json --job KEY`"
        )
    return dumped


def _of_one_job(incidents: Iterable[Incident]) -> list[Incident]:
    """Return the newest incident of each node. Raises InputError for several jobs, because their ranks would mix."""
    oldest_first = sorted(incidents, key=lambda incident: incident.opened_unix_seconds)
    newest = {incident.node: incident for incident in oldest_first}
    jobs = {incident.job.key: incident.job for incident in oldest_first}
    if len(jobs) > 1:
        names = sorted(f"{job.job_id} ({job.owner or 'owner unknown'}, key {job.key})" for job in jobs.values())
        raise InputError(f"these incidents are of several jobs: {', '.join(names)}\n  give the incidents of one job")
    return list(newest.values())


def _sort(paths: Iterable[Path]) -> tuple[list[FileBelow], list[Incident], list[str]]:
    """Return the files to read, the incidents that have a capture, and notes for the report. Raises InputError.

    A file is (path, folder): the argument or the folder below which it was found.
    """
    files: list[FileBelow] = []
    incidents, notes = [], []
    for path in paths:
        if path.name == incident_file.INCIDENT_FILE or (path / incident_file.INCIDENT_FILE).is_file():
            incidents.append(_incident(path))
        elif path.is_dir() and path.samefile("/"):
            raise InputError(f"{path}: is the root of all files: give the folder with the dumps and logs of the job")
        elif path.is_dir():
            below, closed = _files_in(path)
            others, folder_incidents, folder_notes = _incidents_among(below, path)
            files += [(file, path) for file in others]
            incidents += folder_incidents
            notes += [*folder_notes, *_closed(closed, "folder")]
        elif path == Path("-") or path.exists():
            files.append((path, None))
        else:
            is_url = str(path).startswith(("http:", "https:"))
            hint = "; `hangwatch merge URL` reads incidents of daemons" if is_url else ""
            hint = hint or ("; give the folder, or the pattern without quotes" if WILD & set(str(path)) else "")
            raise InputError(f"{path}: no such file or folder{hint}")
    if len(files) > MOST_FILES:
        raise InputError(f"{len(files)} files; at most {MOST_FILES}: give fewer files or a smaller folder")
    return files, _of_one_job(incident for incident in incidents if incident.captures), notes


def _incidents_among(files: Sequence[Path], folder: Path) -> tuple[list[Path], list[Incident], list[str]]:
    """Return the files that belong to no incident, the incidents, and notes on incidents that cannot be read.

    The text files in an incident's folder repeat its stacks, without rounds and counters. They are read only if the
    incident cannot be read. Raises InputError for too many incidents.
    """
    incident_paths = [file for file in files if file.name == incident_file.INCIDENT_FILE]
    if len(incident_paths) > MOST_INCIDENTS:
        raise InputError(
            f"{folder}: has {len(incident_paths)} incidents; give the folder of one: `hangwatch incidents` lists them"
        )
    incidents: list[Incident] = []
    notes: list[str] = []
    consumed: set[Path] = set()
    remaining_bytes = incident_file.MAX_INCIDENT_BYTES
    for path in incident_paths:
        try:
            with bounded_read.open_below(folder, path) as file:
                content = bounded_read.read_rest(file, path, remaining_bytes)
            incident = incident_file.parse(path, content)
        except (bounded_read.FileError, incident_file.StoreError) as error:
            why = words.printable(str(error).splitlines()[0])
            notes.append(f"{why}; the other files of its folder are read instead")
            consumed.add(path)
            continue
        remaining_bytes -= len(content)
        if incident.captures:
            incidents.append(incident)
            consumed.add(path.parent)
            where = words.printable(str(path.parent))
            notes.append(f"{where}: read as an incident of hangwatch, with all its rounds and counters")
    return [file for file in files if consumed.isdisjoint((file, *file.parents))], incidents, notes


def _files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder, and the folders below it that cannot be read. Raises InputError."""
    closed: list[Path] = []
    files = files_below(folder, _may_be_evidence, closed)
    if not files:
        listed = "".join(f"\n  {note}" for note in _closed(closed, "folder"))
        raise InputError(f"{folder}: has no stack dumps or logs{listed}")
    return files, closed


def _may_be_evidence(path: Path) -> bool:
    """True for a regular file, except source code."""
    try:
        return path.suffix not in _SOURCE_CODE and stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    except OSError:  # reported later with the files that cannot be read
        return True


def _left_out(kinds: Mapping[Path, _Kind]) -> Iterator[str]:
    """Yield notes on files that were not read. A note on files that may contain stacks says how to read them."""
    by_kind = {kind: [path for path in kinds if kinds[path] == kind] for kind in set(kinds.values())}
    if others := by_kind.get("other"):
        yield f"skipped, not text: {words.count(len(others), 'file')}"
    if packed := by_kind.get("compressed"):
        yield f"skipped, compressed: {_and_others(packed, 'file')}; unpack first (tar -xf, gunzip, unzstd, unxz, unzip)"
    if reports := by_kind.get("report"):
        yield f"skipped, a report: {_and_others(reports, 'file')}; give the incident.json beside it, or stack dumps"
    yield from _closed(by_kind.get("closed", ()), "file")
    folders = {path.parent for path in by_kind.get("recorder", ())}
    if empty := [path for path in by_kind.get("empty", ()) if path.parent in folders]:
        names = words.join_words([words.printable(path.name) for path in empty[:_MOST_NAMED_FILES]])
        yield f"empty flight recorder dump: {names}: a full disk, or a process that ended while it wrote"


def _closed(paths: Sequence[Path], what: str) -> Iterator[str]:
    if paths:
        yield f"skipped, cannot be read: {_and_others(paths, what)}; try with sudo"


def _and_others(paths: Sequence[Path], what: str) -> str:
    others = f" and {words.count(len(paths) - 1, f'other {what}')}" if len(paths) > 1 else ""
    return f"{words.printable(str(paths[0]))}{others}"


def _kind(path: Path, folder: Path | None) -> _Kind:
    """Return the kind of a file by its first bytes. In a folder, a file with a NUL byte is not text, as in grep(1).

    A file given as an argument, a pipe and standard input are text unless their first bytes show another kind.
    """
    if path == Path("-"):
        head = _peek(sys.stdin.buffer)
        is_packed = head.startswith((_ZSTD, _ZIP)) or head.startswith(_TAR, _TAR_AT)
        return "dumped" if incident_file.is_answer(head) else "compressed" if is_packed else "text"
    if folder is None and not path.is_file():
        return "text"
    try:
        with _opened(path, folder) as file:
            head = _peek(file)
    except (InputError, OSError) as error:  # a file of /proc can be opened and not be read
        if folder is None:
            raise error if isinstance(error, InputError) else InputError(f"{path}: {error.strerror or error}") from None
        return "closed"
    if recorder_dump.begins_so(head):
        return "recorder"
    if incident_file.is_answer(head):
        return "dumped"
    if head.startswith(_HTML) and _OF_REPORT in head:
        return "report"
    is_archive = head.startswith(_ZIP) and (folder is None or path.suffix == ".zip")
    if is_archive or head.startswith(_ZSTD) or head.startswith(_TAR, _TAR_AT):
        return "compressed"
    if not head:
        return "empty"
    return "text" if folder is None or b"\0" not in head or head.startswith(_UTF_16) else "other"


def _flight_dumps(files: Sequence[FileBelow], now: Step) -> tuple[rank_recorders.JoinedDumps, list[str]]:
    """Return the flight recorder dumps in these files, joined by rank, and notes on invalid dumps in folders.

    Raises InputError for an invalid dump that is itself an argument.
    """
    dump_files, refused = [], []
    for (path, folder), _ in zip(files, now.each([path for path, _ in files], len(files), "reading"), strict=True):
        try:
            with _opened(path, folder) as file:
                dump = recorder_dump.parse(file.read(recorder_dump.MOST_BYTES + 1))
            dump = dump._replace(recorders=tuple(map(drop_unneeded, dump.recorders)))
            dump_files.append(rank_recorders.DumpFile(str(path), dump))
        except (ValueError, *_DAMAGED) as error:
            if folder is None:
                raise InputError(f"{path}: {error}") from None
            refused.append(f"{words.printable(str(path))}: {error}")
    if len(refused) > _MOST_NAMED_FILES:
        refused = [f"{len(refused)} files are not valid flight recorder dumps, for example {refused[0]}"]
    return rank_recorders.join(dump_files), refused


def _incident(path: Path) -> Incident:
    if path.is_file() and path.name != incident_file.INCIDENT_FILE:
        raise InputError(
            f"{path}: a file of an incident must be called {incident_file.INCIDENT_FILE}: use one folder per node"
        )
    return incident_file.load(path.parent if path.name == incident_file.INCIDENT_FILE else path)


def _lines(path: Path, folder: Path | None, now: Step, doing: str, notes: list[str]) -> Iterator[str]:
    """Yield the lines of a file. Invalid bytes become replacement characters. Raises InputError.

    The encoding is UTF-8, or UTF-16 with a byte order mark, as PowerShell's `>` writes it. A very long line, such
    as that of a progress bar, is split at a carriage return. A note tells where a damaged or cut archive ends.
    """
    name = "standard input" if path == Path("-") else str(path)
    now.say(f"{doing}{name}")
    remaining_bytes, number = MOST_BYTES, 0
    with _opened(path, folder) as stream:
        if _is_endless(stream.fileno()):
            raise InputError(f"{name}: is a device, not a stack dump")
        rest = b""
        read_line = _line_reader(stream)
        while line := _read_packed(read_line, name, number, notes):
            number += 1
            remaining_bytes -= len(line)
            now.bytes_read += len(line)
            line, rest = rest + line, b""
            if not line.endswith(b"\n"):
                line, _, rest = line.rpartition(b"\r") if len(line) > LONGEST_LINE_BYTES else (line, b"", b"")
            if len(rest or line) > LONGEST_LINE_BYTES:
                raise InputError(
                    f"{name}:{number}: this line is longer than {LONGEST_LINE_BYTES >> 20} MiB: not a stack dump"
                )
            if remaining_bytes < 0:
                raise InputError(f"{name}:{number}: has more than {MOST_BYTES >> 30} GiB; give only the relevant part")
            yield line.decode("utf-8", errors="replace")
        if rest:
            yield rest.decode("utf-8", errors="replace")


def _read_packed(read_line: Callable[[int], bytes], name: str, number: int, notes: list[str]) -> bytes:
    """Return the next line; b"" at the end. A note tells that the end of a packed file is cut or damaged."""
    try:
        return read_line(LONGEST_LINE_BYTES + 1)
    except _DAMAGED as error:
        notes.append(f"{name}:{number}: the rest cannot be read: {error}")
        return b""


def _line_reader(stream: BinaryIO) -> Callable[[int], bytes]:
    """Return a function that reads the next line as UTF-8. Its argument is the maximum number of bytes.

    A byte order mark at the start of the stream is skipped.
    """
    head = _peek(stream)
    if head.startswith(_UTF_16):
        wide = io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline="\n")
        return lambda most: wide.readline(most).encode("utf-8", "replace")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream.readline


def _peek(stream: BinaryIO) -> bytes:
    """Return the first bytes of a stream without consuming them; b"" if this is not possible."""
    with contextlib.suppress(EOFError, zlib.error, lzma.LZMAError):
        return bytes(stream.peek(SNIFFED_BYTES)) if hasattr(stream, "peek") else b""
    return b""


@contextlib.contextmanager
def _opened(path: Path, folder: Path | None) -> Iterator[BinaryIO]:
    """Open a file, standard input (`-`), or a pipe that the shell made for `<(command)`.

    What gzip, xz or bzip2 packed is unpacked. Raises InputError.
    """
    try:
        if path == Path("-"):
            file: BinaryIO = sys.stdin.buffer
        elif folder is not None:
            file = bounded_read.open_below(folder, path)
        else:
            flags = 0 if bounded_read.is_inherited_stream(path) else os.O_NONBLOCK
            file = bounded_read.open_file(path, flags=flags)
    except bounded_read.FileError as error:
        raise InputError(f"{error}\n  for a pipe or a device use standard input: `-`") from None
    with file:
        head = _peek(file)
        unpack = next((unpack for magic, unpack in _UNPACKERS.items() if head.startswith(magic)), None)
        yield file if unpack is None else unpack(file)


def _is_endless(descriptor: int) -> bool:
    """True for a device without an end, such as /dev/zero. Terminals and /dev/null have an end."""
    status = os.fstat(descriptor)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return is_device and not os.isatty(descriptor) and not os.path.samestat(status, Path(os.devnull).stat())
