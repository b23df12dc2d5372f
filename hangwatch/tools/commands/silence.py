"""`hangwatch silence`: let a job on this node not page for some time."""

import re
import time
from pathlib import Path
from urllib.parse import urlencode

import click

from hangwatch import words
from hangwatch.cli import screen, user_socket_client
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import LONGEST_REASON, LONGEST_SILENCE_SECONDS, SHORTEST_SILENCE_SECONDS

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:[0-9]{1,9}[smhd])+", re.ASCII)


@click.command(short_help="Let a job not page for some time, for example while it is debugged.")
@config_option
@click.argument("job")
@click.option("--for", "duration", metavar="DURATION", help="How long: 30m, 2h, 1h30m or 1d. 1m to 7d.")
@click.option("--reason", default="", help="Why, for people who read `hangwatch status`.")
@click.option("--end", "is_end", is_flag=True, help="End the silence now.")
def silence(config_path: Path | None, job: str, duration: str | None, reason: str, is_end: bool) -> None:
    """Let JOB, a name or key from `hangwatch status`, not page until an end.

    The rules of Prometheus drop the page of the job on all its nodes. Root may silence every job of this node, other
    users only their own jobs. `hangwatch status` and `top` show the silence. It survives a restart of the daemon.
    """
    if is_end == (duration is not None):
        raise click.UsageError("give either --for DURATION or --end")
    if len(reason) > LONGEST_REASON:
        raise InputError(f"--reason has {len(reason)} characters: must be at most {LONGEST_REASON}")
    wanted = {"end": "1"} if duration is None else {"seconds": f"{_seconds(duration):.0f}", "reason": reason}
    settings, _ = settings_from(config_path)
    try:
        answer = user_socket_client.silence(settings.socket.path, urlencode({"job": job, **wanted}))
    except user_socket_client.NoDaemonError as error:
        raise InputError(
            f"{error}\n  is it running? `systemctl status hangwatch`, or start it: `hangwatch run`\n"
            "  if it is, its log says why it has no socket"
        ) from None
    except user_socket_client.SocketError as error:
        raise type(error)(f"{error}\n  `hangwatch status` lists the jobs of this node") from None
    name, until = answer.silence.in_log, answer.silence.until_unix_seconds
    now_is = f"silenced until {words.utc(until)} ({words.duration(until - time.time())})"
    click.echo(f"{name} is {'no longer silenced' if is_end else now_is}")
    if answer.problem is not None:
        screen.complain(f"warning: a restart of the daemon undoes this: {answer.problem}")


def _seconds(duration: str) -> float:
    """Return a duration such as "1h30m" in seconds. Raises InputError."""
    parts = re.findall(r"([0-9]+)([smhd])", duration) if _DURATION.fullmatch(duration) else []
    seconds = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if not SHORTEST_SILENCE_SECONDS <= seconds <= LONGEST_SILENCE_SECONDS:
        raise InputError(f"--for {duration}: must be 1m to 7d\n  for example --for 2h or --for 1h30m")
    return seconds


COMMANDS = (silence,)
