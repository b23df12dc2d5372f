"""Commands about the incidents that this node keeps: incidents, report."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from hangwatch import incident_file, store, words
from hangwatch.cli import screen
from hangwatch.cli.files import write_text
from hangwatch.cli.settings import config_option, settings_from
from hangwatch.cli.tables import print_table
from hangwatch.incident_file import StoreError, Summary
from hangwatch.model import Incident
from hangwatch.report import html, text

NO_INCIDENTS = "no incidents that you may read: those of your own jobs, all for root and the group [store] names"


@click.command()
@click.argument("name", required=False, type=click.Path(path_type=Path), metavar="[NAME|DIR]")
@click.option("--job", "wanted", help="The newest incident of this job, by its id, key or name.")
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the page here.")
@click.option("--json", "as_json", is_flag=True, help="Print incident.json, see docs/json.md.")
@config_option
def report(
    name: Path | None, wanted: str | None, html_path: Path | None, as_json: bool, config_path: Path | None
) -> int:
    """Render an incident again, from its incident.json alone: by default the newest that you may read.

    NAME is that of an incident, as `hangwatch incidents` lists it, or a part of it that fits only one; DIR is a folder
    that holds one. Exits 1 where there is no incident.
    """
    if name is not None and wanted is not None:
        raise click.UsageError("give either an incident or --job")
    incident = _incident(name, wanted, config_path)
    if incident is None:
        click.echo(_nothing(), err=True)
        return 1
    if html_path is not None:
        write_text(html_path, html.render(incident))
        click.echo(f"wrote {html_path}", err=True)
    elif as_json:
        sys.stdout.buffer.write(incident_file.encode(incident) + b"\n")
    else:
        screen.show(text.render(incident, color=screen.is_colored(), width=screen.width()))
    return 0


def _incident(name: Path | None, wanted: str | None, config_path: Path | None) -> Incident | None:
    """By its folder, its name or its job; of an own job from the daemon, where we may not read its folder.

    None where there is no incident at all. Raises StoreError.
    """
    if name is not None and _is_folder(name):
        return incident_file.load(name)
    kept = _store(config_path)
    try:
        folder = kept.find(str(name)) if name is not None else kept.newest(wanted)
        if folder is not None:
            return incident_file.load(folder)
    except StoreError:
        if (by_daemon := _of_the_daemon(name, wanted, config_path)) is not None:
            return by_daemon
        raise
    return _of_the_daemon(name, wanted, config_path)


def _of_the_daemon(name: Path | None, wanted: str | None, config_path: Path | None) -> Incident | None:
    """One of the own jobs' incidents over the daemon's socket; None where it gives none. Raises StoreError."""
    if os.geteuid() == 0:
        return None
    from hangwatch.cli import own_daemon

    path = settings_from(config_path)[0].socket.path
    with suppress(own_daemon.SocketError):
        if name is not None:
            return own_daemon.incident(path, str(name))
        found = incident_file.newest(own_daemon.incidents(path), wanted, f"the daemon behind {path}")
        return own_daemon.incident(path, found.folder) if found is not None else None
    return None


def _summaries_of_the_daemon(config_path: Path | None) -> tuple[Summary, ...]:
    """What it lists of the own jobs, where we can list nothing ourselves: the file system has no access lists."""
    if os.geteuid() == 0:
        return ()
    from hangwatch.cli import own_daemon

    with suppress(own_daemon.SocketError):
        return own_daemon.incidents(settings_from(config_path)[0].socket.path)
    return ()


def _is_folder(path: Path) -> bool:
    """False as well where it may not be looked at: then it is a name."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _store(config_path: Path | None) -> store.Store:
    settings, _ = settings_from(config_path)
    return store.Store(Path(settings.store.directory))


def _nothing() -> str:
    return "no incidents" if os.geteuid() == 0 else NO_INCIDENTS


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/json.md describes it.")
@config_option
def incidents(as_json: bool, config_path: Path | None) -> None:
    """List the incidents that this node keeps, newest first."""
    kept = _store(config_path)
    summaries = kept.summaries() or _summaries_of_the_daemon(config_path)
    if as_json:
        sys.stdout.buffer.write(
            msgspec.json.encode(incident_file.Incidents(schema_version=1, incidents=summaries)) + b"\n"
        )
        return
    from hangwatch.probes import host

    here = host.node_name()
    rows = [
        (summary.folder, summary.job_id, _standing(summary, kept, here), summary.problem or summary.message)
        for summary in summaries
    ]
    print_table(("incident", "job", "state", "verdict"), rows, _nothing())


def _standing(summary: Summary, kept: store.Store, here: str) -> str:
    """How the job stands: `hung`, `ended after 3 min 20 s`; and where nobody has closed it, whether it still lives."""
    if summary.problem or summary.state is None:
        return "unreadable"
    state = summary.state.value
    if summary.closed_unix_seconds is not None:
        return f"{state} after {words.duration(summary.closed_unix_seconds - summary.opened_unix_seconds)}"
    if summary.node == here and _is_gone(kept.incidents / summary.folder):
        return f"{state}; its processes are gone"
    return state


def _is_gone(folder: Path) -> bool:
    """Whether no process of the job lives any more: it ended while no daemon watched.

    Where /proc hides the processes of others (`hidepid`), nobody can know.
    """
    from hangwatch.probes import procs

    try:
        ids = incident_file.load(folder).job.processes
    except StoreError:  # it was listed over the socket of the daemon, which closes it itself
        return False
    states = [procs.read_state(process.pid) for process in ids]
    lives = any(state is not None and state[0] == process for process, state in zip(ids, states, strict=True))
    return bool(ids) and not lives and procs.read_state(1) is not None


COMMANDS = (incidents, report)
