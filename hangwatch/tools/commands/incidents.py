"""The commands `incidents` and `report`: the incidents that this node keeps."""

import os
import pwd
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from hangwatch import store, words
from hangwatch.cli import screen
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import StoreError, Summary
from hangwatch.model import Feedback, Incident
from hangwatch.report import html, text
from hangwatch.tools.commands.output_files import write_page

_INDENT = "    "

T = TypeVar("T")


@click.command(short_help="Print an incident, by default the newest one.")
@click.argument("name", required=False, type=click.Path(path_type=Path), metavar="[NAME|DIR|FILE]")
@click.option("--job", "wanted", help="The newest incident of this job, by its id, key or name.")
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page here.")
@click.option("--json", "as_json", is_flag=True, help="Print incident.json, see docs/json.md.")
@config_option
def report(
    name: Path | None, wanted: str | None, html_path: Path | None, as_json: bool, config_path: Path | None
) -> int:
    """Print the report of an incident, by default of the newest one.

    NAME is the name of an incident, as `hangwatch incidents` lists it, or a unique part of it. DIR is the folder of an
    incident or that of `hangwatch dump -o`, FILE an incident.json. Exits 1 if there is no incident that you may read.
    """
    if name is not None and wanted is not None:
        raise click.UsageError("give either an incident or --job")
    sources = _Sources(config_path)
    incident, feedback = _incident(name, wanted, sources) or (None, None)
    if incident is None:
        click.echo(sources.none_found(), err=True)
        return 1
    if html_path is not None:
        write_page(html_path, html.render(incident, feedback))
        click.echo(f"wrote {html_path}", err=True)
    elif as_json:
        sys.stdout.buffer.write(incident_file.encode(incident) + b"\n")
    else:
        screen.show(text.render(incident, feedback, color=screen.is_colored(), width=screen.width()))
    return 0


class _Sources:
    """The sources of incidents: the store on disk, and the daemon for incidents that this user cannot read on disk."""

    def __init__(self, config_path: Path | None) -> None:
        self.settings, self._source = settings_from(config_path)
        self.store = store.Store(Path(self.settings.store.directory))
        self._daemon_answer = ""

    def from_daemon(self, name: Path | None, wanted: str | None) -> Incident | None:
        """Return an incident of this user's jobs from the daemon, over its user socket.

        None if there is no such incident.

        Raises StoreError, and BusyError if the daemon refuses for now.
        """
        return self._ask(lambda: self._daemon_incident(name, wanted))

    def summaries(self) -> tuple[Summary, ...]:
        """Return the incidents in the store. If none is visible, return those that the daemon lists.

        On a file system without access lists, this user cannot see the incidents of the user's own jobs. Raises
        StoreError and BusyError.
        """
        listed = self.store.summaries()
        if listed:
            return listed
        from hangwatch.cli import user_socket_client

        return self._ask(lambda: user_socket_client.incidents(self.settings.socket.path)) or ()

    def _daemon_incident(self, name: Path | None, wanted: str | None) -> Incident | None:
        from hangwatch.cli import user_socket_client

        path = self.settings.socket.path
        if name is not None:
            return user_socket_client.incident(path, str(name))
        newest = incident_file.find_newest(user_socket_client.incidents(path), wanted, f"the daemon behind {path}")
        return user_socket_client.incident(path, newest.folder) if newest is not None else None

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, which queries the daemon; None if the query failed or the user is root.

        Root can read all incidents without the daemon. Raises BusyError if the daemon refuses for now.
        """
        if os.geteuid() == 0:
            return None
        from hangwatch.cli import user_socket_client

        self._daemon_answer = f"the daemon at {self.settings.socket.path} has no incident of your jobs"
        try:
            return ask()
        except user_socket_client.BusyError:
            raise
        except user_socket_client.SocketError as error:
            self._daemon_answer = f"the daemon did not list your incidents: {error}"
            return None

    def none_found(self) -> str:
        """Return the message that there is no incident: in which folder, for which user, and when one begins."""
        uid = os.geteuid()
        hold = words.duration(self.settings.detector.hold_seconds)
        lines = [
            f"no incidents{'' if uid == 0 else ' that you may read'} in {self._folder_state()}",
            f"[store] directory is set by {self._source}; --config FILE selects another configuration",
        ]
        if uid != 0:
            lines += [
                self._daemon_answer,
                f"you are {_user(uid)}: you may read incidents of your own jobs; root and [store] group may read all",
            ]
        lines.append(f"an incident begins when a job is quiet for {hold} and no rank progresses, or when ranks crash")
        return "\n  ".join(filter(None, lines))

    def _folder_state(self) -> str:
        """Return the folder of the incidents as text, with the reason if it cannot be read."""
        folder = self.store.incidents
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            return f"{folder}, which does not exist: no daemon has written there"
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return str(folder)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _incident(name: Path | None, wanted: str | None, sources: _Sources) -> tuple[Incident, Feedback | None] | None:
    """Load an incident and its feedback by path, name or job. None if there is none.

    A folder with several incidents means the newest one. If this user cannot read it on disk, the daemon sends it,
    without feedback. Raises StoreError, BusyError and InputError.
    """
    if name is not None and not (name / incident_file.INCIDENT_FILE).exists() and (name / "incidents").is_dir():
        newest = store.Store(name).newest()
        if newest is None:
            raise InputError(f"{name}: has no incident that you may read")
        return incident_file.load(newest), incident_file.load_feedback(newest)
    if name == Path("-"):
        raise InputError("report does not read standard input: for dumps and logs `hangwatch explain -`")
    if name is not None and (path := _file_of(name)) is not None:
        return incident_file.parse(path, incident_file.read_bytes(path)), incident_file.load_feedback(path.parent)
    try:
        folder = sources.store.find(str(name)) if name is not None else sources.store.newest(wanted)
        if folder is not None:
            return incident_file.load(folder), incident_file.load_feedback(folder)
    except StoreError:
        if (incident := sources.from_daemon(name, wanted)) is not None:
            return incident, None
        raise
    incident = sources.from_daemon(name, wanted)
    return None if incident is None else (incident, None)


def _file_of(path: Path) -> Path | None:
    """Return the path of an incident.json: `path` itself, or the file in the folder `path`.

    None if `path` does not exist or cannot be read. Then the argument is the name of an incident.
    """
    try:
        return path / incident_file.INCIDENT_FILE if path.is_dir() else path if path.exists() else None
    except OSError:
        return None


@click.command(short_help="List the incidents that this node keeps, newest first.")
@click.argument("wanted", metavar="[JOB]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, see docs/json.md.")
@config_option
def incidents(wanted: str | None, as_json: bool, config_path: Path | None) -> int:
    """List the incidents that this node keeps, newest first.

    With JOB, the id, key or name of a job, list only its incidents.
    """
    sources = _Sources(config_path)
    summaries = tuple(
        summary
        for summary in sources.summaries()
        if wanted in (None, summary.job_key, summary.job_id, summary.job_name)
    )
    if as_json:
        sys.stdout.buffer.write(
            msgspec.json.encode(incident_file.Incidents(schema_version=1, incidents=summaries)) + b"\n"
        )
    else:
        _print_list(summaries, sources, wanted)
    return int(wanted is not None and not summaries)


def _print_list(summaries: Sequence[Summary], sources: _Sources, wanted: str | None) -> None:
    """Print a row for each incident. If there is none, print the reason; `wanted` is the selected job."""
    from hangwatch.probes.node import host

    node = host.node_name()
    rows = [
        (
            summary.folder,
            summary.job_id,
            _job_state(summary, sources.store, node),
            summary.problem or f"{summary.verdict}: {summary.message}",
        )
        for summary in summaries
    ]
    if rows and sys.stdout.isatty():
        for row in rows:
            head, verdict = _on_terminal(*row)
            click.echo(f"{click.style(head, bold=True)}\n{verdict}", color=screen.is_colored())
    else:
        none = (
            sources.none_found()
            if wanted is None
            else f"{wanted}: no incident of such a job; `hangwatch incidents` lists all"
        )
        print_table(("incident", "job", "state", "verdict"), rows, "" if rows else none)


def _on_terminal(folder: str, job: str, state: str, verdict: str) -> tuple[str, str]:
    """Return two lines about an incident, cut to the terminal's width. Elsewhere, and in its report, it is whole."""
    folder, state, job, verdict = (words.printable(" ".join(text.split())) for text in (folder, state, job, verdict))
    columns = max(screen.columns(), len(_INDENT) + 20)
    head = words.elided(f"{state}  {folder}  {job}", columns)
    return head, _INDENT + words.elided(verdict, columns - len(_INDENT))


def _job_state(summary: Summary, incidents_store: store.Store, node: str) -> str:
    """Return the state of the job, such as `ended after 3 min 20 s`; if its processes no longer exist, that, too."""
    if summary.problem or summary.state is None:
        return "not written" if summary.verdict else "cannot be read"
    state = summary.state.value
    if summary.closed_unix_seconds is not None:
        lasted_seconds = summary.closed_unix_seconds - summary.opened_unix_seconds
        return f"{state} after {words.duration(lasted_seconds)}".removesuffix(" after 0 s")  # 0: its ranks crashed
    if summary.node == node and _is_gone(incidents_store.incidents / summary.folder):
        return f"{state}; its processes have ended"
    return state


def _is_gone(folder: Path) -> bool:
    """True if no process of an open incident's job exists, because the daemon stopped before the job ended.

    False if /proc hides the processes of other users (`hidepid`).
    """
    from hangwatch.probes.base import procfs

    try:
        ids = incident_file.load(folder).job.processes
    except StoreError:  # the daemon listed the incident. A running daemon closes its incidents itself
        return False
    return bool(ids) and not any(map(procfs.is_alive, ids)) and procfs.read_state(1) is not None


COMMANDS = (incidents, report)
