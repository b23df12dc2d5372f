"""`hangwatch explain`: a verdict over dumps and logs that people already have."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import click
from msgspec.structs import replace

from hangwatch import incident_file, inputs, words
from hangwatch.cli.errors import InputError
from hangwatch.cli.files import MOST_FILES, files_below, write_text
from hangwatch.cli.watch import config_option, settings_from
from hangwatch.explain import log_evidence, traces
from hangwatch.hang import culprit
from hangwatch.hang.activity import load as load_activities
from hangwatch.hang.grouping import group_ranks
from hangwatch.model import MOST_RANKS, Grouping, Incident, Job, Verdict
from hangwatch.report import as_json, html, text

LONGEST_LINE_BYTES = 16 << 20  # `py-spy dump --json` may print one line
MOST_BYTES = 4 << 30  # of one file or of standard input
MANY_FILES = 200
SNIFFED_BYTES = 8 << 10

_File = tuple[Path, Path | None]  # and the folder in which it was found, None where it was named

html_option = click.option(
    "--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as one page."
)
json_option = click.option("--json", "as_json_form", is_flag=True, help="Print JSON, as docs/json.md describes it.")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|DIR...", type=click.Path(path_type=Path))
@click.option(
    "--world-size", type=click.IntRange(1, MOST_RANKS), help="How many ranks the job has; tells who is absent."
)
@json_option
@html_option
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
    ends before the others. A folder is all the text files in it (torchrun's --log-dir), or the incident that it holds;
    links in it are not followed, and what begins with a dot is left out. "-" is standard input.
    """
    settings, _ = settings_from(config_path)
    files, incidents = _sort(paths)
    texts = [(path, folder) for path, folder in files if folder is None or _is_text(path, folder)]
    with _progress(texts) as reading:
        collected = traces.collect(((str(path), _lines(path, folder)) for path, folder in reading), world_size)
    if len(texts) < len(files):
        told = f"without text, left out: {words.count(len(files) - len(texts), 'file')}"
        collected = collected._replace(notes=(*collected.notes, told))
    dumps = [*collected.ranks, *(rank for incident in incidents for rank in incident.captures[-1].ranks)]
    if not dumps and not collected.logs:
        notes = "".join(f"\n  {note}" for note in collected.notes[:5])
        raise InputError(
            f"no stack dump and no log of a known rank in {', '.join(map(str, paths))}{notes}\n"
            "  make some: `py-spy dump --pid PID > rank0.txt`"
        )
    size = collected.world_size or max((found.job.world_size or 0 for found in incidents), default=0) or None
    grouping = group_ranks(dumps, load_activities(settings.activities.rules), settings.capture, size)
    grouping = replace(grouping, notes=(*grouping.notes, *collected.notes))
    job = incidents[0].job if incidents else None
    verdict = culprit.judge(grouping, _ranks_here(incidents) if not files else None) if dumps else None
    if verdict is None or collected.logs:
        verdict = log_evidence.judge(verdict, collected.logs)
    print_answer(grouping, verdict, job, as_json_form, html_path)


def _ranks_here(incidents: Sequence[Incident]) -> int | None:
    """How many ranks were looked at where all that is given comes from one node; None where it is of several."""
    return incidents[0].job.ranks_here or None if len(incidents) == 1 else None


def _of_one_job(incidents: Iterable[Incident]) -> list[Incident]:
    """The newest incident of each node. Raises InputError where they are of several jobs: their ranks would mix."""
    oldest_first = sorted(incidents, key=lambda incident: incident.opened_unix_seconds)
    newest = {incident.node: incident for incident in oldest_first}
    jobs = {incident.job.key: incident.job for incident in oldest_first}
    if len(jobs) > 1:
        told = sorted(f"{job.job_id} ({job.owner or 'owner unknown'}, key {job.key})" for job in jobs.values())
        raise InputError(f"these incidents are of several jobs: {', '.join(told)}\n  give those of one job at a time")
    return list(newest.values())


def print_answer(
    grouping: Grouping, verdict: Verdict, job: Job | None, as_json_form: bool, html_path: Path | None
) -> None:
    """Print the verdict on groups as text or JSON; as a page, too, where one is asked for."""
    if html_path is not None:
        write_text(html_path, html.render_grouping(grouping, verdict))
    if as_json_form:
        click.echo(as_json.render(as_json.answer(grouping, verdict, job)), nl=False)
    else:
        click.echo(text.render_verdict(grouping, verdict, color=sys.stdout.isatty()), nl=False)


def _sort(paths: Iterable[Path]) -> tuple[list[_File], list[Incident]]:
    """Files, and incidents with a capture."""
    files: list[_File] = []
    incidents = []
    for path in paths:
        if path.name == incident_file.INCIDENT_FILE or (path / incident_file.INCIDENT_FILE).is_file():
            incidents.append(_incident(path))
        elif path.is_dir():
            files += [(file, path) for file in _files_in(path)]
        elif path == Path("-") or path.exists():
            files.append((path, None))
        else:
            raise InputError(f"{path}: no such file or folder")
    if len(files) > MOST_FILES:
        raise InputError(f"{len(files)} files are more than {MOST_FILES}; name the ones you mean")
    return files, _of_one_job(incident for incident in incidents if incident.captures)


def _files_in(folder: Path) -> list[Path]:
    found = files_below(folder, _is_own_file)
    if not found:
        raise InputError(f"{folder}: has no files")
    return found


def _is_own_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_text(path: Path, folder: Path) -> bool:
    """Whether a file that lies in a folder begins as text does: no NUL in its first bytes, as grep(1) tells it."""
    with _opened(path, folder) as file:
        return b"\0" not in file.read(SNIFFED_BYTES)


def _progress(files: Sequence[_File]) -> AbstractContextManager[Iterable[_File]]:
    """The files, with a bar on a terminal where they are many."""
    if len(files) < MANY_FILES:
        return nullcontext(files)
    return click.progressbar(files, label="reading", file=sys.stderr, hidden=not sys.stderr.isatty())


def _incident(path: Path) -> Incident:
    if path.is_file() and path.name != incident_file.INCIDENT_FILE:
        raise InputError(
            f"{path}: is a file, and not called {incident_file.INCIDENT_FILE}: give each node's in a folder of its own"
        )
    return incident_file.load(path.parent if path.name == incident_file.INCIDENT_FILE else path)


def _lines(path: Path, folder: Path | None = None) -> Iterator[str]:
    """The lines of a file, read as they are asked for; what is no text becomes replacement characters.

    `folder` is the one in which it was found. A progress bar, which is one line for hours, ends at each return.
    """
    is_input = path == Path("-")
    stream, name = (sys.stdin.buffer, "standard input") if is_input else (_opened(path, folder), str(path))
    left, number = MOST_BYTES, 0
    with stream:
        if _is_endless(stream.fileno()):
            raise InputError(f"{name}: is a device, and no stack dump")
        begun = b""
        while line := stream.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            left -= len(line)
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


def _opened(path: Path, folder: Path | None) -> BinaryIO:
    """A file, or a pipe that the shell has made for us; one that lies in a folder may have no writer, ever."""
    is_ours = path == Path("/dev/stdin") or path.parent == Path("/dev/fd")
    try:
        if folder is not None:
            return inputs.opened_below(folder, path)
        return inputs.opened(path, flags=0 if is_ours else os.O_NONBLOCK)
    except inputs.FileError as error:
        raise InputError(f"{error}\n  what comes from a pipe or a device is read from standard input: `-`") from None


def _is_endless(descriptor: int) -> bool:
    """Whether this is a device like /dev/zero; a terminal has an end, and so has /dev/null."""
    found = os.fstat(descriptor)
    is_device = stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)
    return is_device and not os.isatty(descriptor) and not os.path.samestat(found, Path(os.devnull).stat())


COMMANDS = (explain,)
