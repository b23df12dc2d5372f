"""A verdict from the stack dumps and logs in files and folders, printed by `hangwatch explain`."""

import gc
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli import progress_line
from hangwatch.cli.progress_line import Step
from hangwatch.cli.usage_errors import InputError
from hangwatch.collectives.rank_records import drop_unneeded
from hangwatch.config import Settings
from hangwatch.formats import bounded_read, incident_file
from hangwatch.logs import enqueued_work, kernel_text, log_evidence
from hangwatch.model import Grouping, Incident, Job, Supplement, Verdict
from hangwatch.report import as_json
from hangwatch.stacks.activity import load as load_activities
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tables.environment_names import WILD
from hangwatch.tools.commands.input_files import DAMAGED, FileBelow, Kind, kind_of, opened, read_lines
from hangwatch.tools.commands.output import print_answer
from hangwatch.tools.commands.output_files import MOST_FILES, files_below
from hangwatch.tools.explain import traces
from hangwatch.tools.explain.flight_dumps import rank_recorders, recorder_dump
from hangwatch.verdict import judge, recorder_dumps
from hangwatch.verdict.judge import complete
from hangwatch.verdict.recommendation import with_action

MOST_INCIDENTS = 64  # in one folder; all together have at most MAX_INCIDENT_BYTES
_MOST_NAMED_FILES = 8
_OF_LOGS = (".log", ".out", ".err", ".txt")
_SKIPPED: tuple[tuple[Kind, str, str], ...] = (
    ("other", "not text", ""),
    ("compressed", "compressed", "; unpack first (tar -xf, gunzip, unzstd, unxz, unzip)"),
    ("report", "a report", "; give the incident.json beside it, or stack dumps"),
)
_SOURCE_CODE = (".py", ".pyi", ".ipynb", ".sh", ".js", ".ts", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_JOB_FOLDER = re.compile(r"(?:job|run|exp|experiment|trial|slurm)[-_.]?\w{1,64}|\d{4,12}", re.IGNORECASE | re.ASCII)


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
    # Stacks have no reference cycles, and garbage collection takes a third of the time for many ranks
    gc.disable()
    now.say("looking for files")
    files, incidents, about_incidents = _sort(paths)
    looked_at = now.each([path for path, _ in files], len(files), "looking at")
    kinds = {path: kind_of(path, folder) for path, (_, folder) in zip(looked_at, files, strict=True)}
    texts = [(path, folder) for path, folder in files if kinds[path] in ("text", "empty")]
    notes: list[str] = []
    named_lines = (
        (str(path), read_lines(path, folder, now, f"reading {number:,} of {len(texts):,}: ", notes))
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
    of_kernel = (
        kernel_text.supplement(
            collected.kernel, [member.id for member in grouping.members], enqueued_work.find_gpus(collected.works)
        )
        if collected.kernel
        else Supplement()
    )
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
            with opened(path, folder) as file:
                content = bounded_read.read_rest(file, path, incident_file.MAX_INCIDENT_BYTES)
        except DAMAGED as error:
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
            notes += [*folder_notes, *_closed(closed)]
        elif path == Path("-") or path.exists():
            files.append((path, None))
        else:
            hint = "; give the folder, or the pattern without quotes" if WILD & set(str(path)) else ""
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
        listed = "".join(f"\n  {note}" for note in _closed(closed))
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


def _left_out(kinds: Mapping[Path, Kind]) -> Iterator[str]:
    """Yield notes on files that were not read. A note on files that may contain stacks says how to read them."""
    by_kind = {kind: [path for path in kinds if kinds[path] == kind] for kind in set(kinds.values())}
    for kind, why, remedy in _SKIPPED:
        if paths := by_kind.get(kind):
            yield f"skipped, {why}: {_list_paths(paths)}{remedy}"
    yield from _closed(by_kind.get("closed", ()))
    folders = {path.parent for path in by_kind.get("recorder", ())}
    if dumps := [path for path in by_kind.get("empty", ()) if path.parent in folders and path.suffix not in _OF_LOGS]:
        yield f"empty flight recorder dump: {_list_paths(dumps)}: a full disk, or a process that ended while it wrote"
    if logs := [path for path in by_kind.get("empty", ()) if path not in dumps]:
        yield f"empty: {_list_paths(logs)}"


def _closed(paths: Sequence[Path]) -> Iterator[str]:
    if paths:
        yield f"skipped, cannot be read: {_list_paths(paths)}; try with sudo"


def _list_paths(paths: Sequence[Path]) -> str:
    more = [words.count(len(paths) - _MOST_NAMED_FILES, "other")] if len(paths) > _MOST_NAMED_FILES else []
    return words.join_words([*(words.printable(str(path)) for path in paths[:_MOST_NAMED_FILES]), *more])


def _flight_dumps(files: Sequence[FileBelow], now: Step) -> tuple[rank_recorders.JoinedDumps, list[str]]:
    """Return the flight recorder dumps in these files, joined by rank, and notes on invalid dumps."""
    dump_files, refused = [], []
    for (path, folder), _ in zip(files, now.each([path for path, _ in files], len(files), "reading"), strict=True):
        try:
            with opened(path, folder) as file:
                dump = recorder_dump.parse(file.read(recorder_dump.MOST_BYTES + 1))
            dump = dump._replace(recorders=tuple(map(drop_unneeded, dump.recorders)))
            dump_files.append(rank_recorders.DumpFile(str(path), dump))
        except (ValueError, *DAMAGED) as error:
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
