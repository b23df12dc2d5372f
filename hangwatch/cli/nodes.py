"""Commands about many nodes as one: merge."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hangwatch import incident_file, inputs, words
from hangwatch.cli.errors import InputError
from hangwatch.cli.explain import html_option, json_option, print_answer
from hangwatch.cli.files import files_below
from hangwatch.fleet import across, sighting
from hangwatch.fleet.merge import Gathering
from hangwatch.model import Job

MOST_TOLD = 10
INCOMPLETE = 1

_File = tuple[Path, Path | None]  # and the folder in which it was found, None where it was named

job_option = click.option("--job", "wanted", help="Only this job of several, by its name or key.")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|DIR...", type=click.Path(path_type=Path))
@job_option
@click.option("--as-one-job", is_flag=True, help="Take incidents of several jobs for those of one.")
@json_option
@html_option
def merge(
    *, paths: tuple[Path, ...], wanted: str | None, as_one_job: bool, as_json_form: bool, html_path: Path | None
) -> int:
    """One answer from the incidents of many nodes: the odd rank is usually on another one.

    A FILE is an incident.json, or what `hangwatch dump --json --grouped` printed on a node; a DIR all such files below
    it, called *.json: brought here by any means (shared file system, kubectl cp, scp). "-" is standard input. Of one
    node only the newest incident of a job counts. Files that cannot be read are named and left out.

    Exits 1 where something was left out, 2 where nothing is left.
    """
    gc.disable()  # values refer to no later ones, so there is nothing to collect; to look for it doubles the time
    gathering, problems = _gathered(paths)
    jobs = gathering.jobs
    keys = list(jobs) if as_one_job else [_chosen(wanted, jobs)]
    for problem in problems[:MOST_TOLD]:
        click.echo(f"hangwatch: left out: {problem}", err=True)
    if len(problems) > MOST_TOLD:
        click.echo(f"hangwatch: left out: {words.count(len(problems) - MOST_TOLD, 'more file')}", err=True)
    grouping = gathering.merged(keys)
    ranks_here = gathering.ranks_here(keys[0]) if len(keys) == 1 else None
    print_answer(grouping, across.judge(grouping, ranks_here), jobs[keys[0]], as_json_form, html_path)
    return INCOMPLETE if problems else 0


def _gathered(paths: Sequence[Path]) -> tuple[Gathering, list[str]]:
    """What the files hold, and why some of them were left out. Raises InputError where all were, or there are none."""
    gathering, problems, is_empty = Gathering(), [], True
    for file in (file for path in paths for file in _files(path)):
        try:
            found = _read(*file).jobs
        except incident_file.StoreError as error:
            problems.append(str(error))
            continue
        for one in found:
            gathering.add(one)
            is_empty = False
    if is_empty:
        raise InputError("\n".join(problems[:MOST_TOLD]) or f"no job in {', '.join(map(str, paths))}")
    return gathering, problems


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
            content = inputs.content_of(sys.stdin.buffer, "standard input", incident_file.MAX_INCIDENT_BYTES)
            return sighting.parse(Path("standard input"), content)
        with (
            inputs.opened(path, flags=incident_file.NO_LINK)
            if folder is None
            else inputs.opened_below(folder, path) as file
        ):
            return sighting.read(path, file)
    except inputs.FileError as error:
        raise incident_file.StoreError(f"{error}{_REMEDIES.get(error.errno, '')}") from None


_REMEDIES = {
    errno.EACCES: "\n  incidents are their owner's and root's: run as root, or as who may read them",
    errno.ELOOP: "\n  it is a link, and no link is followed: name what it leads to",
}


def _chosen(wanted: str | None, jobs: Mapping[str, Job]) -> str:
    """The key of the one job that is meant. Raises InputError: ranks of several jobs would mix."""
    keys = [key for key, job in jobs.items() if wanted in (None, key, job.job_id)]
    exact = [key for key in keys if key == wanted]
    if len(exact or keys) == 1:
        return (exact or keys)[0]
    told = ", ".join(
        sorted(
            f"{words.printable(job.job_id)} ({job.owner or 'owner unknown'}, key {key})" for key, job in jobs.items()
        )
    )
    if not keys:
        raise InputError(f"--job {wanted}: no incident of such a job\n  jobs: {told}")
    raise InputError(
        f"these incidents are of several jobs: {told}\n"
        "  choose one with --job KEY; or, where they are one all the same, --as-one-job"
    )


COMMANDS = (merge,)
