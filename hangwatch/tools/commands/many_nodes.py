"""Verdicts over many nodes: `hangwatch merge` and `hangwatch dump --nodes`."""

from __future__ import annotations

import errno
import gc
import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli import screen
from hangwatch.cli.options import html_option, json_option
from hangwatch.cli.reach import Reach
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import bounded_read, incident_file, sighting
from hangwatch.model import Grouping, Job, Verdict, find_jobs
from hangwatch.report import as_json, dump_text, html, text
from hangwatch.tools.commands import node_options
from hangwatch.tools.commands.input_files import FileBelow
from hangwatch.tools.commands.node_options import MOST_TOLD
from hangwatch.tools.commands.output import print_answer, print_nodes_answer, verdict_text
from hangwatch.tools.commands.output_files import NewFolder, files_below, write_text
from hangwatch.tools.fleet import cross_node
from hangwatch.tools.fleet.merge import SightingCollector

if TYPE_CHECKING:
    from hangwatch.cli.dump import DumpOptions
    from hangwatch.tools.fleet.node_replies import Replies

_REMEDIES = {
    **incident_file.READ_REMEDIES,
    errno.ENOENT: "\n  write one file for each node: `ssh NODE hangwatch report --json >NODE.json`",
}
MOST_JOBS = 256  # per node, in the folder of --raw
MOST_ROUNDS = 10
INCOMPLETE = 1
BAD = 2


job_option = click.option("--job", "wanted", help="Merge only this job, by id, key or name.")


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE|DIR...")
@job_option
@click.option("--as-one-job", is_flag=True, help="Merge incidents of several jobs as if they were one job.")
@json_option
@html_option
def merge(
    *,
    sources: tuple[Path, ...],
    wanted: str | None,
    as_one_job: bool,
    as_json_form: bool,
    html_path: Path | None,
) -> int:
    """Give one verdict from the incidents of many nodes.

    FILE is an incident.json, or the output of `hangwatch dump --json --grouped` on a node. DIR means all *.json files
    below it. "-" is standard input. Only the newest incident of a job on each node counts.

    Exits 1 if a file had to be skipped, 2 if nothing could be read.
    """
    # The values have no reference cycles, and garbage collection would double the time
    gc.disable()
    gathering = SightingCollector()
    problems = _gather(sources, gathering)
    jobs = gathering.jobs
    if not jobs:
        raise InputError("\n".join(problems[:MOST_TOLD]) or f"no job found in {', '.join(map(str, sources))}")
    keys = list(jobs) if as_one_job else [_chosen(wanted, jobs)]
    for problem in problems[:MOST_TOLD]:
        screen.complain(f"skipped: {problem}")
    if len(problems) > MOST_TOLD:
        click.echo(f"hangwatch: skipped: {words.count(len(problems) - MOST_TOLD, 'more file')}", err=True)
    grouping = gathering.merge_jobs(keys)
    ranks_here = gathering.ranks_here(keys[0]) if len(keys) == 1 else None
    verdict = cross_node.judge(grouping, ranks_here, leaves=gathering.leaves(keys))
    print_answer(grouping, verdict, jobs[keys[0]], as_json_form, html_path)
    return INCOMPLETE if problems else 0


def _missed(replies: Replies, grouping: Grouping) -> Sequence[str]:
    """Return the nodes that did not respond if the groups may lack their ranks: absent ranks, or no world size."""
    return replies.silent if grouping.absent or grouping.world_size is None else ()


def _gather(paths: Sequence[Path], gathering: SightingCollector) -> list[str]:
    """Add the jobs in these files and folders to `gathering`. Return the errors of files that could not be read."""
    problems = []
    for file in (file for path in paths for file in _files(path)):
        try:
            jobs = _read(*file).jobs
        except incident_file.StoreError as error:
            problems.append(str(error))
            continue
        for job in jobs:
            gathering.add(job)
    return problems


def _files(path: Path) -> Iterator[FileBelow]:
    if path == Path("-") or not path.is_dir():
        yield path, None
        return
    files = files_below(path, lambda file: file.suffix == ".json" and file.name not in ("event.json", "feedback.json"))
    if not files:
        raise InputError(
            f"{path}: has no incident: no file below it is called *.json\n"
            f"  stack dumps and logs: `hangwatch explain {path}`"
        )
    yield from ((file, path) for file in files)


def _read(path: Path, folder: Path | None) -> sighting.GroupedDump:
    """Read the incident or grouped dump in a file. Raises StoreError. `folder` is the folder argument that contains it.

    If `folder` is set, no link below it is followed.
    """
    try:
        if path == Path("-"):
            content = bounded_read.read_rest(sys.stdin.buffer, "standard input", incident_file.MAX_INCIDENT_BYTES)
            return sighting.parse(Path("standard input"), content)
        with (
            bounded_read.open_file(path, flags=incident_file.NO_LINK)
            if folder is None
            else bounded_read.open_below(folder, path) as file
        ):
            return sighting.read(path, file)
    except bounded_read.FileError as error:
        raise incident_file.StoreError(f"{error}{_REMEDIES.get(error.errno, '')}") from None


def _chosen(wanted: str | None, jobs: Mapping[str, Job]) -> str:
    """Return the key of the wanted job. Raises InputError if no job or several jobs match, because ranks would mix."""
    matching = list(jobs.values()) if wanted is None else find_jobs(wanted, jobs.values())
    if len(matching) == 1:
        return matching[0].key
    names = ", ".join(
        sorted(
            f"{words.printable(job.job_id)} ({job.owner or 'owner unknown'}, key {key})" for key, job in jobs.items()
        )
    )
    if not matching:
        raise InputError(f"--job {wanted}: no incident of this job\n  jobs: {names}")
    raise InputError(
        f"these incidents are of several jobs: {names}\n"
        "  choose one with --job KEY; if they are one job, use --as-one-job"
    )


# --- `hangwatch dump --nodes` ----------------------------------------------------------------------------------------


def dump_nodes(reach: Reach, question: DumpOptions) -> int:
    """Dump on many nodes at the same time and print one verdict per job. Return the exit code.

    1: no job was found. 2: no node could run the dump.
    """
    from hangwatch.tools.fleet.node_replies import Replies

    gc.disable()
    nodes = node_options.resolve_nodes(reach)
    replies, kept = Replies(with_stacks=question.raw is not None), _Kept(question.directory)
    stacks = None if question.raw is None else NewFolder(question.raw)

    def take(_: str, dump: sighting.GroupedDump) -> None:
        kept.keep(dump)
        if stacks is not None:
            _keep_stacks(stacks, dump)

    only = f" --job {shlex.quote(question.wanted)}" if question.wanted else ""
    form = "--json --grouped" + (" --stacks" if stacks else "")
    arguments = f"dump {form} --rounds {question.rounds}{only}"
    node_options.run_hangwatch(reach, nodes, arguments, replies, take)
    if stacks is not None:
        click.echo(f"stacks: {words.count(stacks.files, 'file')} in {question.raw}", err=True)
    return _conclude(question, replies, kept, len(nodes))


def _conclude(question: DumpOptions, replies: Replies, kept: _Kept, node_count: int) -> int:
    """Print the verdict on each job. Return the exit code."""
    jobs = replies.gathering.jobs
    keys = [_chosen(question.wanted, jobs)] if question.wanted and jobs else list(jobs)
    answers = []
    for key in keys:
        grouping = replies.gathering.merge_jobs([key])
        ranks_here = replies.gathering.ranks_here(key) if node_count == 1 else None
        leaves = replies.gathering.leaves([key])
        verdict = cross_node.judge(grouping, ranks_here, _missed(replies, grouping), replies.clocks, leaves)
        answers.append(as_json.answer(grouping, verdict, jobs[key]))
        if question.directory is not None and not question.as_json_form:
            click.echo(f"{words.printable(jobs[key].job_id)}: {words.printable(verdict.message)}")
        elif not question.as_json_form:
            if len(keys) > 1:
                job, nodes = jobs[key], words.fold_nodes(replies.gathering.nodes(key))
                owner = words.printable(job.owner) or "owner unknown"
                click.echo(f"Job {words.printable(job.job_id)} ({owner}, key {job.key}) on {nodes}\n")
            click.echo(verdict_text(grouping, verdict), nl=len(keys) > 1, color=screen.is_colored())
        kept.report(key, grouping, verdict)
    if question.as_json_form:
        without_job = tuple(sorted(replies.without_job))
        print_nodes_answer(as_json.NodesDump, replies, without_job=without_job, jobs=tuple(answers))
    if not answers:
        click.echo(node_options.describe_no_job(replies.without_job), err=True)
    return 0 if answers else BAD if replies.failed and not replies.answered else INCOMPLETE


def _keep_stacks(stacks: NewFolder, dump: sighting.GroupedDump) -> None:
    """Write one folder per job with one file per rank. `hangwatch explain` can read the files."""
    commands = {sighted.job.job_key: sighted.job.command for sighted in dump.jobs}
    for capture in dump.captures[:MOST_JOBS]:
        command = commands.get(capture.job_key, "")
        for rank in capture.ranks:
            rounds = (dump_text.rank_lines(rank, command, number) for number in range(min(capture.rounds, MOST_ROUNDS)))
            text = "".join(f"{line}\n" for lines in rounds for line in lines)
            stacks.write(_folder_of(capture.job_key), f"{dump.node}.{dump_text.file_name(rank.id)}", text)


def _folder_of(key: str) -> str:
    """Return a safe folder name for a job key, because a node could send any text as key."""
    return key[:64] if key.isascii() and key.isalnum() else hashlib.sha256(key.encode()).hexdigest()[:16]


class _Kept:
    """The folder of -o, if given: the reply of each node for `hangwatch merge`, and a report for each job."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        if directory is not None:
            _make_private_folder(directory / "nodes")

    def keep(self, dump: sighting.GroupedDump) -> None:
        if self._directory is not None:
            write_text(self._directory / "nodes" / f"{dump.node}.json", as_json.render(replace(dump, captures=())))

    def report(self, key: str, grouping: Grouping, verdict: Verdict) -> None:
        if self._directory is None:
            return
        name = f"report-{_folder_of(key)}"
        write_text(self._directory / f"{name}.txt", text.render_verdict(grouping, verdict))
        write_text(self._directory / f"{name}.html", html.render_grouping(grouping, verdict))
        click.echo(f"report: {self._directory / name}.html", err=True)


def _make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can read, because stacks show users' code and paths. Raises InputError."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}") from None


COMMANDS = (merge,)
