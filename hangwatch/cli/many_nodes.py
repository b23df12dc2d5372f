"""Many nodes as one: `hangwatch merge`, and what `hangwatch dump --nodes` asks and says."""

from __future__ import annotations

import gc
import hashlib
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli import incident_sources, screen
from hangwatch.cli.node_options import MOST_TOLD, NODE_DEADLINE_SECONDS, Reach, ask, nodes_of, topology_option
from hangwatch.cli.output import html_option, json_option, nodes_dump, print_answer, verdict_text
from hangwatch.cli.output_files import NewFolder, files_below, write_text
from hangwatch.cli.usage_errors import InputError
from hangwatch.fleet import cross_node, sighting
from hangwatch.fleet import topology as topology_file
from hangwatch.fleet.merge import Gathering
from hangwatch.fleet.topology import Leaf
from hangwatch.formats import bounded_read, incident_file
from hangwatch.model import Grouping, Job, Verdict, called
from hangwatch.report import as_json, dump_text, html, text

if TYPE_CHECKING:
    from hangwatch.fleet import remote_run
    from hangwatch.fleet.node_replies import Replies

MOST_JOBS = 256  # of one node, whose stacks are kept
MOST_ROUNDS = 10
INCOMPLETE = 1
BAD = 2

_File = tuple[Path, Path | None]  # and the folder in which it was found, None where it was named

job_option = click.option("--job", "wanted", help="Only this job of several, by its id, key or name.")


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE|DIR|URL...")
@click.option("--prometheus", help="Also from the nodes on which this Prometheus has seen the --job.")
@job_option
@topology_option
@click.option("--as-one-job", is_flag=True, help="Take incidents of several jobs for those of one.")
@incident_sources.http_config_option("For URLs")
@click.option("--prometheus-http-config", type=click.Path(path_type=Path), help="The same for --prometheus.")
@click.option(
    "--deadline",
    "deadline_seconds",
    type=click.FloatRange(1, 3600),
    default=NODE_DEADLINE_SECONDS,
    show_default=True,
    help="For each URL, in seconds.",
)
@json_option
@html_option
@screen.no_pager_option
def merge(
    *,
    sources: tuple[str, ...],
    as_one_job: bool,
    topology: Path | None,
    as_json_form: bool,
    html_path: Path | None,
    **fetching: Any,
) -> int:
    """One answer from the incidents of many nodes: the odd rank is usually on another one.

    A FILE is an incident.json, or what `hangwatch dump --json --grouped` printed on a node; a DIR all such files below
    it, called *.json: brought here by any means (shared file system, kubectl cp, scp). "-" is standard input. A URL is
    a daemon (https://NODE:9836) or one of its incidents; a node that does not answer is evidence. Of one node only the
    newest incident of a job counts. What cannot be read is named and left out.

    Exits 1 where something was left out, 2 where nothing is left.
    """
    from hangwatch.fleet.node_replies import Replies

    gc.disable()  # values refer to no later ones, so there is nothing to collect; to look for it doubles the time
    by_file = _by_file(topology)
    asked = incident_sources.Asked(
        urls=[source for source in sources if source.lower().startswith(("http://", "https://"))], **fetching
    )
    wanted = asked.wanted
    if not sources and asked.prometheus is None:
        raise click.UsageError("give what is to be merged: FILE, DIR, URL or --prometheus")
    replies = Replies()
    problems = _gather([Path(source) for source in sources if source not in asked.urls], replies.gathering)
    if asked.urls or asked.prometheus is not None:
        wanted = incident_sources.fetch(asked, replies)
    jobs = replies.gathering.jobs
    if not jobs:
        raise InputError(_nothing_merged(problems, replies, sources))
    keys = list(jobs) if as_one_job else [_chosen(wanted, jobs)]
    for problem in problems[:MOST_TOLD]:
        screen.complain(f"left out: {problem}")
    if len(problems) > MOST_TOLD:
        click.echo(f"hangwatch: left out: {words.count(len(problems) - MOST_TOLD, 'more file')}", err=True)
    grouping = replies.gathering.merged(keys)
    ranks_here = replies.gathering.ranks_here(keys[0]) if len(keys) == 1 and not replies.silent else None
    leaves = by_file or replies.gathering.leaves(keys)
    verdict = cross_node.judge(grouping, ranks_here, _missed(replies, grouping), replies.clocks, leaves)
    print_answer(grouping, verdict, jobs[keys[0]], as_json_form, html_path)
    return INCOMPLETE if problems or replies.failed or replies.silent else 0


def _by_file(path: Path | None) -> dict[str, Leaf]:
    return {} if path is None else topology_file.read(path)


def _missed(replies: Replies, grouping: Grouping) -> Sequence[str]:
    """The silent nodes, where they may have ranks that nobody else has shown."""
    return replies.silent if grouping.absent or grouping.world_size is None else ()


def _gather(paths: Sequence[Path], gathering: Gathering) -> list[str]:
    """Take in what the files hold. Returns why some of them were left out."""
    problems = []
    for file in (file for path in paths for file in _files(path)):
        try:
            found = _read(*file).jobs
        except incident_file.StoreError as error:
            problems.append(str(error))
            continue
        for one in found:
            gathering.add(one)
    return problems


def _nothing_merged(problems: Sequence[str], replies: Replies, sources: Sequence[str]) -> str:
    if problems:
        return "\n".join(problems[:MOST_TOLD])
    if replies.failed or replies.silent:
        return "no node gave an incident"
    return f"no job in {', '.join(sources) or 'what Prometheus has seen'}"


def _files(path: Path) -> Iterator[_File]:
    if path == Path("-") or not path.is_dir():
        yield path, None
        return
    found = files_below(path, lambda file: file.suffix == ".json")
    if not found:
        raise InputError(f"{path}: holds no incident: no file below it is called *.json")
    yield from ((file, path) for file in found)


def _read(path: Path, folder: Path | None) -> sighting.GroupedDump:
    """Raises StoreError."""
    try:
        if path == Path("-"):
            content = bounded_read.content_of(sys.stdin.buffer, "standard input", incident_file.MAX_INCIDENT_BYTES)
            return sighting.parse(Path("standard input"), content)
        with (
            bounded_read.opened(path, flags=incident_file.NO_LINK)
            if folder is None
            else bounded_read.opened_below(folder, path) as file
        ):
            return sighting.read(path, file)
    except bounded_read.FileError as error:
        raise incident_file.StoreError(f"{error}{incident_file.READ_REMEDIES.get(error.errno, '')}") from None


def _chosen(wanted: str | None, jobs: Mapping[str, Job]) -> str:
    """The key of the one job that is meant. Raises InputError: ranks of several jobs would mix."""
    meant = list(jobs.values()) if wanted is None else called(wanted, jobs.values())
    if len(meant) == 1:
        return meant[0].key
    told = ", ".join(
        sorted(
            f"{words.printable(job.job_id)} ({job.owner or 'owner unknown'}, key {key})" for key, job in jobs.items()
        )
    )
    if not meant:
        raise InputError(f"--job {wanted}: no incident of such a job\n  jobs: {told}")
    raise InputError(
        f"these incidents are of several jobs: {told}\n"
        "  choose one with --job KEY; or, where they are one all the same, --as-one-job"
    )


# --- asking nodes now ------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """What `hangwatch dump --nodes` was told."""

    reach: Reach
    wanted: str | None
    rounds: int
    as_json_form: bool
    directory: Path | None
    raw: Path | None = None
    topology: Path | None = None


def dump_nodes(question: Question) -> int:
    """Dump on many nodes at the same time, and give one verdict for each job. Exits 1 where no job was found."""
    from hangwatch.fleet.node_replies import Replies

    gc.disable()
    by_file = _by_file(question.topology)
    nodes = nodes_of(question.reach)
    replies, kept = Replies(with_stacks=question.raw is not None), _Kept(question.directory)
    stacks = None if question.raw is None else NewFolder(question.raw)

    def take(reply: remote_run.Reply) -> None:
        dump = replies.take(reply)
        if dump is not None:
            kept.keep(dump)
            if stacks is not None:
                _keep_stacks(stacks, dump)

    only = f" --job {shlex.quote(question.wanted)}" if question.wanted else ""
    form = "--json --grouped" + (" --stacks" if stacks else "")
    ask(question.reach, nodes, f"dump {form} --rounds {question.rounds}{only}", replies, take)
    if stacks is not None:
        click.echo(f"stacks: {words.count(stacks.files, 'file')} in {question.raw}", err=True)
    return _conclude(question, replies, kept, len(nodes), by_file)


def _conclude(question: Question, replies: Replies, kept: _Kept, asked: int, by_file: Mapping[str, Leaf]) -> int:
    """Print the verdict on each job."""
    jobs = replies.gathering.jobs
    keys = [_chosen(question.wanted, jobs)] if question.wanted and jobs else list(jobs)
    answers = []
    for key in keys:
        grouping = replies.gathering.merged([key])
        ranks_here = replies.gathering.ranks_here(key) if asked == 1 else None
        leaves = by_file or replies.gathering.leaves([key])
        verdict = cross_node.judge(grouping, ranks_here, _missed(replies, grouping), replies.clocks, leaves)
        answers.append(as_json.answer(grouping, verdict, jobs[key]))
        if question.directory is not None and not question.as_json_form:
            click.echo(f"{words.printable(jobs[key].job_id)}: {words.printable(verdict.message)}")
        elif not question.as_json_form and len(keys) > 1:
            click.echo(_head(jobs[key], replies.gathering.nodes(key)))
            click.echo(verdict_text(grouping, verdict), color=screen.is_colored())
        elif not question.as_json_form:
            screen.show(verdict_text(grouping, verdict))
        kept.report(key, grouping, verdict)
    if question.as_json_form:
        form = nodes_dump(replies, replies.without_job, answers)
        click.echo(as_json.render(form), nl=False)
    if not answers:
        click.echo(_nothing(replies), err=True)
    return 0 if answers else BAD if replies.failed and not replies.answered else INCOMPLETE


def _nothing(replies: Replies) -> str:
    if replies.answered:
        return f"no training job runs on {words.fold_nodes(replies.without_job)}, as far as this user may see there"
    return "no node answered"


def _head(job: Job, nodes: Collection[str]) -> str:
    owner = f"{words.printable(job.owner) or 'owner unknown'}, key {job.key}"
    return f"Job {words.printable(job.job_id)} ({owner}) on {words.fold_nodes(nodes)}\n"


def _keep_stacks(stacks: NewFolder, dump: sighting.GroupedDump) -> None:
    """A folder for each job, in it a file for each rank, which `hangwatch explain` reads."""
    commands = {one.job.job_key: one.job.command for one in dump.jobs}
    for capture in dump.captures[:MOST_JOBS]:
        command = commands.get(capture.job_key, "")
        for rank in capture.ranks:
            rounds = (dump_text.rank_lines(rank, command, number) for number in range(min(capture.rounds, MOST_ROUNDS)))
            text = "".join(f"{line}\n" for lines in rounds for line in lines)
            stacks.write(_folder_of(capture.job_key), f"{dump.node}.{dump_text.file_name(rank.id)}", text)


def _folder_of(key: str) -> str:
    """A name for what belongs to the job of this key, which a node may have made up."""
    return key[:64] if key.isascii() and key.isalnum() else hashlib.sha256(key.encode()).hexdigest()[:16]


class _Kept:
    """The folder that -o names: what each node answered, which `hangwatch merge` reads, and a report of each job."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        if directory is not None:
            _make_folder(directory / "nodes")

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


def _make_folder(folder: Path) -> None:
    """For us alone: stacks name code and paths of other people's jobs."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None


COMMANDS = (merge,)
