"""`hangwatch explain`: a verdict over dumps and logs that people already have."""

from __future__ import annotations

import codecs
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import click
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli import progress_line, screen
from hangwatch.cli.config_choice import config_option, settings_from
from hangwatch.cli.output import html_option, json_option, print_answer
from hangwatch.cli.output_files import MOST_FILES, files_below
from hangwatch.cli.progress_line import Waiting
from hangwatch.cli.usage_errors import InputError
from hangwatch.collectives.rank_records import shortened
from hangwatch.config import Settings
from hangwatch.explain import traces
from hangwatch.explain.flight_dumps import rank_recorders, recorder_dump
from hangwatch.explain.flight_dumps.safe_pickle import MOST_BYTES as MOST_RECORDER_BYTES
from hangwatch.explain.logs import kernel_text, log_evidence
from hangwatch.formats import bounded_read, incident_file
from hangwatch.model import MOST_RANKS, Grouping, Incident, Job, Supplement, Verdict
from hangwatch.report import as_json
from hangwatch.stacks.activity import load as load_activities
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge, recorder_dumps
from hangwatch.verdict.supplements import complete

LONGEST_LINE_BYTES = 16 << 20  # `py-spy dump --json` may print one line
MOST_BYTES = 4 << 30  # of one file or of standard input
MOST_INCIDENTS = 64  # of a folder that is no incident itself, and all of them together as big as one may be
SNIFFED_BYTES = 8 << 10
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")  # gzip, zstd, xz, bzip2
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_REFUSED_TOLD = 8

_DUMPED = re.compile(rb'\s*\{\s*"schema_version":\s*\d+,\s*"node":')  # `hangwatch dump --json`
_Kind = Literal["recorder", "dumped", "text", "empty", "compressed", "other", "closed"]
_File = tuple[Path, Path | None]  # and the folder in which it was found, None where it was named


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|DIR...", type=click.Path(path_type=Path))
@click.option(
    "--world-size", type=click.IntRange(1, MOST_RANKS), help="How many ranks the job has; tells who is absent."
)
@json_option
@html_option
@screen.no_pager_option
@config_option
def explain(
    *,
    paths: tuple[Path, ...],
    world_size: int | None,
    as_json_form: bool,
    html_path: Path | None,
    config_path: Path | None,
) -> None:
    """Who is the odd one in stack dumps and logs that you already have?

    Reads the stacks of any number of processes as py-spy (text or --json), pystack, gdb and Python's faulthandler print
    them, with or without a prefix on each line: [host:rank], torchrun's [role3]:, srun --label's "3: ", mpirun
    --tag-output's [1,3]<stdout>:. Reads logs of ranks and torchelastic's error.json, too: who failed first, whose log
    ends before the others. Reads the dumps that torch makes of its flight recorder, as pickle (by the watchdog at a
    time-out: comm_lib_trace_rank_3) or as JSON: who has not come to which collective. A folder is all such files in it
    (torchrun's --log-dir), or the incidents that it holds; links in it are not followed, and what begins with a dot is
    left out. Reads what `hangwatch dump --json` printed. "-" is standard input, for text and for that.
    """
    settings, _ = settings_from(config_path)
    with progress_line.shown() as now:
        answer = _answer(paths, world_size, settings, now)
    print_answer(*answer, as_json_form, html_path)


def _answer(
    paths: Sequence[Path], world_size: int | None, settings: Settings, now: Waiting
) -> tuple[Grouping, Verdict, Job | None]:
    """What all these say together; raises InputError where they say nothing."""
    now.say("looking for files")
    files, incidents, about_incidents = _sort(paths)
    looked_at = now.each([path for path, _ in files], len(files), "looking at")
    kinds = {path: _kind(path, folder) for path, (_, folder) in zip(looked_at, files, strict=True)}
    texts = [(path, folder) for path, folder in files if kinds[path] in ("text", "empty")]
    collected = traces.collect(_named_lines(texts, now), world_size)
    recorders, notes = _flight_dumps([(path, folder) for path, folder in files if kinds[path] == "recorder"], now)
    now.say(f"comparing {words.count(len(collected.ranks), 'rank')}")
    answers = _of_dumps([(path, folder) for path, folder in files if kinds[path] == "dumped"], incidents)
    notes += [*about_incidents, *_left_out(kinds)]
    collected = collected._replace(notes=(*recorders.notes, *collected.notes, *notes))
    dumps = [*collected.ranks, *(rank for incident in incidents for rank in incident.captures[-1].ranks)]
    dumps += [rank for answer in answers for rank in (answer.capture.ranks if answer.capture else ())]
    dumps += recorder_dumps.without_stacks(recorders.by_rank, dumps)
    if not dumps and not collected.logs and not collected.kernel:
        told = "".join(f"\n  {note}" for note in collected.notes[:5])
        raise InputError(
            f"no stack dump and no log of a known rank in {', '.join(map(str, paths))}{told}\n"
            "  make some: `py-spy dump --pid PID > rank0.txt`"
        )
    told_sizes = [found.job.world_size or 0 for found in incidents] + [answer.world_size or 0 for answer in answers]
    size = collected.world_size or max(told_sizes, default=0) or recorders.world_size
    grouping = group_ranks(dumps, load_activities(settings.activities.rules), settings.capture, size or None)
    grouping = replace(grouping, notes=(*grouping.notes, *collected.notes))
    grouping = recorder_dumps.with_records(grouping, recorders.timed, recorders.opened_before_unix_seconds)
    job = incidents[0].job if incidents else None
    ranks_here = _ranks_here(incidents) if not files else None
    verdict = judge.judge(grouping, ranks_here, recorders.by_rank) if dumps else None
    if verdict is not None and recorders.by_rank:
        verdict = complete(verdict, Supplement(evidence=recorders.evidence))
    if collected.logs:
        verdict = complete(verdict, log_evidence.supplement(collected.logs))
    if verdict is None or collected.kernel:
        ids = [member.id for member in grouping.members]
        verdict = complete(verdict, kernel_text.supplement(collected.kernel, ids))
    return grouping, verdict, job


def _ranks_here(incidents: Sequence[Incident]) -> int | None:
    """How many ranks were looked at where all that is given comes from one node; None where it is of several."""
    return incidents[0].job.ranks_here or None if len(incidents) == 1 else None


def _of_dumps(files: Iterable[_File], incidents: Iterable[Incident]) -> list[as_json.Answer]:
    """What `hangwatch dump --json` printed. Raises InputError where it is of several jobs, or of another version."""
    found: list[as_json.Answer] = []
    for path, folder in files:
        try:
            with sys.stdin.buffer if path == Path("-") else _opened(path, folder) as file:
                content = bounded_read.content_of(file, path, incident_file.MAX_INCIDENT_BYTES)
        except bounded_read.FileError as error:
            raise InputError(str(error)) from None
        answers = incident_file.decode(path, content, as_json.Dump).jobs
        for answer in answers:
            ranks = answer.capture.ranks if answer.capture is not None else ()
            numbers = (number for rank in ranks for number in (rank.id.rank, rank.id.local_rank))
            incident_file.refuse_incredible(path, [answer.world_size, *numbers])
        found += answers
    jobs = {answer.job.job_key: f"{answer.job.job_id} ({answer.job.owner})" for answer in found if answer.job}
    jobs |= {incident.job.key: incident.job.job_id for incident in incidents if found}
    if len(jobs) > 1:
        raise InputError(
            f"these are of several jobs: {', '.join(sorted(jobs.values()))}\n"
            "  give those of one at a time: `hangwatch dump --json --job KEY`"
        )
    return found


def _of_one_job(incidents: Iterable[Incident]) -> list[Incident]:
    """The newest incident of each node. Raises InputError where they are of several jobs: their ranks would mix."""
    oldest_first = sorted(incidents, key=lambda incident: incident.opened_unix_seconds)
    newest = {incident.node: incident for incident in oldest_first}
    jobs = {incident.job.key: incident.job for incident in oldest_first}
    if len(jobs) > 1:
        told = sorted(f"{job.job_id} ({job.owner or 'owner unknown'}, key {job.key})" for job in jobs.values())
        raise InputError(f"these incidents are of several jobs: {', '.join(told)}\n  give those of one job at a time")
    return list(newest.values())


def _sort(paths: Iterable[Path]) -> tuple[list[_File], list[Incident], list[str]]:
    """Files, and incidents with a capture; and notes on those that were found in a folder."""
    files: list[_File] = []
    incidents, notes = [], []
    for path in paths:
        if path.name == incident_file.INCIDENT_FILE or (path / incident_file.INCIDENT_FILE).is_file():
            incidents.append(_incident(path))
        elif path.is_dir():
            below, closed = _files_in(path)
            beside, found, told = _incidents_among(below, path)
            files += [(file, path) for file in beside]
            incidents += found
            notes += [*told, *_closed(closed, "folder")]
        elif path == Path("-") or path.exists():
            files.append((path, None))
        else:
            raise InputError(f"{path}: no such file or folder")
    if len(files) > MOST_FILES:
        raise InputError(f"{len(files)} files are more than {MOST_FILES}; name the ones you mean")
    return files, _of_one_job(incident for incident in incidents if incident.captures), notes


def _incidents_among(files: Sequence[Path], folder: Path) -> tuple[list[Path], list[Incident], list[str]]:
    """The files below a folder without those of incidents, these incidents, and notes that say so.

    An incident has the rounds of its looks, their counters and the flight recorders; the texts beside it are the same
    stacks without these. One that cannot be read is left to the texts. Raises InputError where they are too many.
    """
    named = [file for file in files if file.name == incident_file.INCIDENT_FILE]
    if len(named) > MOST_INCIDENTS:
        raise InputError(f"{folder}: holds {len(named)} incidents; name the folder of one: `hangwatch incidents`")
    incidents: list[Incident] = []
    notes: list[str] = []
    own: set[Path] = set()
    left_bytes = incident_file.MAX_INCIDENT_BYTES
    for path in named:
        try:
            with bounded_read.opened_below(folder, path) as file:
                content = bounded_read.content_of(file, path, left_bytes)
            incident = incident_file.parse(path, content)
        except (bounded_read.FileError, incident_file.StoreError) as error:
            why = words.printable(str(error).splitlines()[0])
            notes.append(f"{why}; what lies beside it is read instead")
            own.add(path)
            continue
        left_bytes -= len(content)
        if incident.captures:
            incidents.append(incident)
            own.add(path.parent)
            where = words.printable(str(path.parent))
            notes.append(f"{where}: is an incident of hangwatch, read with its rounds and all that was measured")
    return [file for file in files if own.isdisjoint((file, *file.parents))], incidents, notes


def _files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files below a folder, and the folders below it that cannot be read."""
    closed: list[Path] = []
    found = files_below(folder, _is_own_file, closed)
    if not found:
        told = "".join(f"\n  {note}" for note in _closed(closed, "folder"))
        raise InputError(f"{folder}: has no files{told}")
    return found, closed


def _is_own_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    except OSError:  # what it is, its folder does not say: it is told with those that cannot be read
        return True


def _left_out(kinds: Mapping[Path, _Kind]) -> Iterator[str]:
    """Notes on files that nothing is read of, with what to do where that may be a loss."""
    of_kind = {kind: [path for path, one in kinds.items() if one == kind] for kind in set(kinds.values())}
    if others := of_kind.get("other"):
        yield f"without text, left out: {words.count(len(others), 'file')}"
    if packed := of_kind.get("compressed"):
        name = words.printable(str(packed[0]))
        many = f" and {words.count(len(packed) - 1, 'other file')}" if len(packed) > 1 else ""
        yield f"compressed, left out: {name}{many}; unpack first (gunzip, unzstd, unxz, bunzip2)"
    yield from _closed(of_kind.get("closed", ()), "file")
    folders = {path.parent for path in of_kind.get("recorder", ())}
    if empty := [path for path in of_kind.get("empty", ()) if path.parent in folders]:
        who = words.listing([words.printable(path.name) for path in empty[:_REFUSED_TOLD]])
        yield f"empty beside dumps of flight recorders: {who}: a full disk, or a process that ended while it wrote"


def _closed(paths: Sequence[Path], what: str) -> Iterator[str]:
    if paths:
        many = f" and {words.count(len(paths) - 1, f'other {what}')}" if len(paths) > 1 else ""
        yield f"cannot be read, left out: {words.printable(str(paths[0]))}{many}; try it with sudo"


def _kind(path: Path, folder: Path | None) -> _Kind:
    """What a file holds by its first bytes: a dump of a flight recorder, else text, as grep(1) tells it (no NUL).

    Standard input and a pipe are text, whatever they hold, and so is any other file that was named.
    """
    if path == Path("-"):
        return "dumped" if _DUMPED.match(_begun()) else "text"
    if folder is None and not path.is_file():
        return "text"
    try:
        with _opened(path, folder) as file:
            head = file.read(SNIFFED_BYTES)
    except InputError:
        if folder is None:
            raise
        return "closed"
    if recorder_dump.begins_so(head):
        return "recorder"
    if _DUMPED.match(head):
        return "dumped"
    if head.startswith(_PACKED):
        return "compressed"
    if not head:
        return "empty"
    return "text" if folder is None or b"\0" not in head or head.startswith(_UTF_16) else "other"


def _begun() -> bytes:
    """What standard input begins with, which is still read afterwards; nothing of what is no stream of bytes."""
    stream = sys.stdin.buffer
    return stream.peek(SNIFFED_BYTES) if isinstance(stream, io.BufferedReader) else b""


def _named_lines(files: Sequence[_File], now: Waiting) -> Iterator[tuple[str, Iterator[str]]]:
    for number, (path, folder) in enumerate(files, 1):
        name = "standard input" if path == Path("-") else str(path)
        yield str(path), _lines(path, folder, now, f"reading {number:,} of {len(files):,}: {name}")


def _flight_dumps(files: Sequence[_File], now: Waiting) -> tuple[rank_recorders.Joined, list[str]]:
    """Dumps of flight recorders by rank, and notes on those in a folder that are refused.

    Raises InputError for one that was named.
    """
    found, refused = [], []
    for (path, folder), _ in zip(files, now.each([path for path, _ in files], len(files), "reading"), strict=True):
        try:
            with _opened(path, folder) as file:
                written = os.fstat(file.fileno()).st_mtime
                dump = recorder_dump.parse(file.read(MOST_RECORDER_BYTES + 1), written)
            dump = dump._replace(recorders=tuple(map(shortened, dump.recorders)))
            found.append(rank_recorders.DumpFile(str(path), written, dump))
        except ValueError as error:
            if folder is None:
                raise InputError(f"{path}: {error}") from None
            refused.append(f"{words.printable(str(path))}: {error}")
    if len(refused) > _REFUSED_TOLD:
        refused = [f"{len(refused)} files are no dumps of a flight recorder, for example {refused[0]}"]
    return rank_recorders.join(found), refused


def _incident(path: Path) -> Incident:
    if path.is_file() and path.name != incident_file.INCIDENT_FILE:
        raise InputError(
            f"{path}: is a file, and not called {incident_file.INCIDENT_FILE}: give each node's in a folder of its own"
        )
    return incident_file.load(path.parent if path.name == incident_file.INCIDENT_FILE else path)


def _lines(path: Path, folder: Path | None, now: Waiting, doing: str) -> Iterator[str]:
    """The lines of a file, read as they are asked for; what is no text becomes replacement characters.

    UTF-8, or UTF-16 with its mark, as PowerShell's `>` writes it. `folder` is the one in which it was found. A progress
    bar, which is one line for hours, ends at each return.
    """
    now.say(doing)
    is_input = path == Path("-")
    stream, name = (sys.stdin.buffer, "standard input") if is_input else (_opened(path, folder), str(path))
    left, number = MOST_BYTES, 0
    with stream:
        if _is_endless(stream.fileno()):
            raise InputError(f"{name}: is a device, and no stack dump")
        begun = b""
        read_line = _reader(stream)
        while line := read_line(LONGEST_LINE_BYTES + 1):
            number += 1
            left -= len(line)
            now.bytes_read += len(line)
            line, begun = begun + line, b""
            if not line.endswith(b"\n"):
                line, _, begun = line.rpartition(b"\r") if len(line) > LONGEST_LINE_BYTES else (line, b"", b"")
            if len(begun or line) > LONGEST_LINE_BYTES:
                where = f"{name}:{number}"
                raise InputError(f"{where}: a line is longer than {LONGEST_LINE_BYTES >> 20} MiB: is no stack dump")
            if left < 0:
                raise InputError(
                    f"{name}:{number}: holds more than {MOST_BYTES >> 30} GiB; name the part that you mean"
                )
            yield line.decode("utf-8", errors="replace")
        if begun:
            yield begun.decode("utf-8", errors="replace")


def _reader(stream: BinaryIO) -> Callable[[int], bytes]:
    """What reads the next line as UTF-8, so many bytes or characters of it; the mark of an encoding is left out."""
    head = stream.peek(3) if isinstance(stream, io.BufferedReader) else b""
    if head.startswith(_UTF_16):
        wide = io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline="\n")
        return lambda most: wide.readline(most).encode("utf-8", "replace")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream.readline


def _opened(path: Path, folder: Path | None) -> BinaryIO:
    """A file, or a pipe that the shell has made for us."""
    try:
        if folder is not None:
            return bounded_read.opened_below(folder, path)
        return bounded_read.opened(path, flags=0 if bounded_read.is_handed_over(path) else os.O_NONBLOCK)
    except bounded_read.FileError as error:
        raise InputError(f"{error}\n  what comes from a pipe or a device is read from standard input: `-`") from None


def _is_endless(descriptor: int) -> bool:
    """Whether this is a device like /dev/zero; a terminal has an end, and so has /dev/null."""
    found = os.fstat(descriptor)
    is_device = stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)
    return is_device and not os.isatty(descriptor) and not os.path.samestat(found, Path(os.devnull).stat())


COMMANDS = (explain,)
