"""Commands about the incidents that this node keeps: incidents, report."""

from __future__ import annotations

import os
import pwd
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from hangwatch import store, words
from hangwatch.cli import screen
from hangwatch.cli.config_choice import config_option, settings_from
from hangwatch.cli.output_files import write_text
from hangwatch.cli.text_tables import print_table
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import StoreError, Summary
from hangwatch.model import Incident
from hangwatch.report import html, text

_INDENT = "    "

T = TypeVar("T")


@click.command()
@click.argument("name", required=False, type=click.Path(path_type=Path), metavar="[NAME|DIR|FILE]")
@click.option("--job", "wanted", help="The newest incident of this job, by its id, key or name.")
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the page here.")
@click.option("--json", "as_json", is_flag=True, help="Print incident.json, see docs/json.md.")
@screen.no_pager_option
@config_option
def report(
    name: Path | None, wanted: str | None, html_path: Path | None, as_json: bool, config_path: Path | None
) -> int:
    """Render an incident again, from its incident.json alone: by default the newest that you may read.

    NAME is that of an incident, as `hangwatch incidents` lists it, or a part of it that fits only one; DIR is a folder
    that holds one, FILE its incident.json. Exits 1 where there is no incident.
    """
    if name is not None and wanted is not None:
        raise click.UsageError("give either an incident or --job")
    place = _Place(config_path)
    incident = _incident(name, wanted, place)
    if incident is None:
        click.echo(place.nothing(), err=True)
        return 1
    if html_path is not None:
        write_text(html_path, html.render(incident))
        click.echo(f"wrote {html_path}", err=True)
    elif as_json:
        sys.stdout.buffer.write(incident_file.encode(incident) + b"\n")
    else:
        screen.show(text.render(incident, color=screen.is_colored(), width=screen.width()))
    return 0


class _Place:
    """Where this user's incidents are looked for: in the store, and at the daemon, whose rights may reach further."""

    def __init__(self, config_path: Path | None) -> None:
        self.settings, self._source = settings_from(config_path)
        self.kept = store.Store(Path(self.settings.store.directory))
        self._daemon = ""

    def of_daemon(self, name: Path | None, wanted: str | None) -> Incident | None:
        """One of the own jobs' incidents over the daemon's socket; None where it gives none. Raises StoreError."""
        found = self._asked(lambda: self._one_of_daemon(name, wanted))
        return found if isinstance(found, Incident) else None

    def summaries(self) -> tuple[Summary, ...]:
        """What the store lists; else the daemon, since the file system may have no access lists. Raises StoreError."""
        listed = self.kept.summaries()
        if listed:
            return listed
        from hangwatch.cli import user_socket_client

        return self._asked(lambda: user_socket_client.incidents(self.settings.socket.path)) or ()

    def _one_of_daemon(self, name: Path | None, wanted: str | None) -> Incident | None:
        from hangwatch.cli import user_socket_client

        path = self.settings.socket.path
        if name is not None:
            return user_socket_client.incident(path, str(name))
        found = incident_file.newest(user_socket_client.incidents(path), wanted, f"the daemon behind {path}")
        return user_socket_client.incident(path, found.folder) if found is not None else None

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """What the daemon answers; root reads the files themselves. Raises TemporaryError."""
        if os.geteuid() == 0:
            return None
        from hangwatch.cli import user_socket_client

        self._daemon = f"the daemon behind {self.settings.socket.path} lists none of your jobs, either"
        try:
            return ask()
        except user_socket_client.BusyError:
            raise
        except user_socket_client.SocketError as error:
            self._daemon = f"the daemon could not be asked: {error}"
            return None

    def nothing(self) -> str:
        """That there is no incident: where it was looked for, as whom, and why there may be none."""
        uid = os.geteuid()
        hold = words.duration(self.settings.detector.hold_seconds)
        lines = [
            f"no incidents{'' if uid == 0 else ' that you may read'} in {self._standing()}",
            f"[store] directory is that of {self._source}; --config FILE names another one",
        ]
        if uid != 0:
            lines += [
                self._daemon,
                f"you are {_user(uid)}, who sees those of his own jobs; root and the group that [store] names see all",
            ]
        lines.append(
            f"one begins where a job has been quiet for {hold} and its ranks stand still, or where ranks crash"
        )
        return "\n  ".join(filter(None, lines))

    def _standing(self) -> str:
        """The folder, and what keeps us from it."""
        folder = self.kept.incidents
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            return f"{folder}, which does not exist: no daemon has kept any there"
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return str(folder)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _incident(name: Path | None, wanted: str | None, place: _Place) -> Incident | None:
    """By its folder or file, its name or its job; of an own job from the daemon, where we may not read its folder.

    None where there is no incident at all. Raises StoreError.
    """
    if name is not None and (path := _file_of(name)) is not None:
        return incident_file.parse(path, incident_file.read_bytes(path))
    try:
        folder = place.kept.find(str(name)) if name is not None else place.kept.newest(wanted)
        if folder is not None:
            return incident_file.load(folder)
    except StoreError:
        if (by_daemon := place.of_daemon(name, wanted)) is not None:
            return by_daemon
        raise
    return place.of_daemon(name, wanted)


def _file_of(path: Path) -> Path | None:
    """The incident.json that a path leads to; None where nothing is there that we may look at: then it is a name."""
    try:
        return path / incident_file.INCIDENT_FILE if path.is_dir() else path if path.exists() else None
    except OSError:
        return None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/json.md describes it.")
@click.option("-l", "--full", is_flag=True, help="Whole verdicts on a terminal, too, where else each is cut to a line.")
@config_option
def incidents(as_json: bool, full: bool, config_path: Path | None) -> None:
    """List the incidents that this node keeps, newest first."""
    place = _Place(config_path)
    summaries = place.summaries()
    if as_json:
        sys.stdout.buffer.write(
            msgspec.json.encode(incident_file.Incidents(schema_version=1, incidents=summaries)) + b"\n"
        )
        return
    from hangwatch.probes.node import host

    here = host.node_name()
    rows = [
        (summary.folder, summary.job_id, _standing(summary, place.kept, here), _verdict(summary))
        for summary in summaries
    ]
    if rows and sys.stdout.isatty():
        for row in rows:
            head, *rest = _on_terminal(*row, full=full)
            click.echo("\n".join((click.style(head, bold=True), *rest)), color=screen.is_colored())
    else:
        print_table(("incident", "job", "state", "verdict"), rows, "" if rows else place.nothing())


def _verdict(summary: Summary) -> str:
    """What kind it is of, then its sentence, which begins with the rank that is named."""
    return summary.problem or f"{summary.verdict}: {summary.message}"


def _on_terminal(folder: str, job: str, state: str, verdict: str, *, full: bool) -> list[str]:
    """Two lines for an incident, cut to the terminal's width unless they are to be `full`."""
    folder, state, job, verdict = (words.printable(" ".join(text.split())) for text in (folder, state, job, verdict))
    head = f"{folder}  {state}  {job}"
    wide = max(screen.columns(), len(_INDENT) + 20)
    if not full:
        return [words.elided(head, wide), _INDENT + words.elided(verdict, wide - len(_INDENT))]
    room = max(screen.width(), 2 * len(_INDENT) + 20)
    return [head, *textwrap.wrap(verdict, room, initial_indent=_INDENT, subsequent_indent=_INDENT)]


def _standing(summary: Summary, kept: store.Store, here: str) -> str:
    """How the job stands: `hung`, `ended after 3 min 20 s`; and where nobody has closed it, whether it still lives."""
    if summary.problem or summary.state is None:
        return "not written" if summary.verdict else "unreadable"
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
    from hangwatch.probes.process import procfs

    try:
        ids = incident_file.load(folder).job.processes
    except StoreError:  # it was listed over the socket of the daemon, which closes it itself
        return False
    states = [procfs.read_state(process.pid) for process in ids]
    lives = any(state is not None and state[0] == process for process, state in zip(ids, states, strict=True))
    return bool(ids) and not lives and procfs.read_state(1) is not None


COMMANDS = (incidents, report)
