"""`hangwatch verdict`: feedback on verdicts."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import click

from hangwatch import store
from hangwatch.cli import user_socket_client
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option
from hangwatch.cli.usage_errors import InputError, with_sudo
from hangwatch.model import LONGEST_CAUSE
from hangwatch.web import feedback_record


@click.command(short_help="Record whether the verdict of an incident was right.")
@click.argument("name", metavar="INCIDENT")
@click.option("--right", "is_right", is_flag=True, help="The named rank was the culprit, or none could be named.")
@click.option("--wrong", "is_wrong", is_flag=True, help="The verdict named another rank, or should have named one.")
@click.option("--culprit", type=click.IntRange(0), metavar="RANK", help="With --wrong: the rank that blocked the job.")
@click.option("--cause", default="", help=f"The cause, for readers of the report; at most {LONGEST_CAUSE} characters.")
@config_option
def verdict(
    *, name: str, is_right: bool, is_wrong: bool, culprit: int | None, cause: str, config_path: Path | None
) -> None:
    """Record whether the verdict of INCIDENT, a name from `hangwatch incidents`, was right.

    It replaces earlier feedback. Root, the owner of [store] directory and members of [store] group may give it.
    """
    if is_right == is_wrong:
        raise click.UsageError("give either --right or --wrong")
    if len(cause) > LONGEST_CAUSE:
        raise InputError(f"--cause has {len(cause)} characters: must be at most {LONGEST_CAUSE}")
    settings, _ = settings_from(config_path)
    incidents, uid = store.Store(Path(settings.store.directory)), os.geteuid()
    try:
        if _is_owner(incidents.incidents):
            with _owner_rights(incidents.incidents):
                done = feedback_record.record(
                    incidents, name, is_right=is_right, culprit=culprit, cause=cause, by_uid=uid
                )
        else:
            wanted = {"incident": name, "right": int(is_right), "cause": cause}
            rank = {} if culprit is None else {"culprit": culprit}
            done = user_socket_client.verdict(settings.socket.path, urlencode(wanted | rank))
    except user_socket_client.SocketError as error:
        raise InputError(f"{error}\n  type: {with_sudo()}") from None
    click.echo(done)


def _is_owner(incidents: Path) -> bool:
    """True for root and the owner of the folder of incidents. True without a folder: the search reports that."""
    try:
        return os.geteuid() in (0, incidents.stat().st_uid)
    except FileNotFoundError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def _owner_rights(incidents: Path) -> Iterator[None]:
    """Give root the rights of the owner of the folder of incidents: the daemon must be able to read the feedback."""
    uid, gid = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):  # the search for the incident reports it
        status = incidents.stat()
        if uid == 0:
            os.setegid(status.st_gid)
            os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)


COMMANDS = (verdict,)
