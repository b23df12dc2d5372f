"""Options that several commands declare. This module imports nothing that runs a command, so a help text is cheap."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_CONFIG = Path("/etc/hangwatch/hangwatch.toml")

Command = TypeVar("Command", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Configuration file.  [default: {DEFAULT_CONFIG} if it exists, else built-in defaults]",
)
html_option = click.option(
    "--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write an HTML page here."
)
json_option = click.option("--json", "as_json_form", is_flag=True, help="Print JSON, see docs/json.md.")

url_option = click.option("--url", help="URL of the daemon.  [default: this host, at the port in the configuration]")


class _Pid(click.IntRange):
    """A process id. A list of several is refused, with what to type instead."""

    name = "pid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the pid. Raises click.BadParameter."""
        if isinstance(value, str) and "," in value:
            pids = value.replace(",", " ").split()
            self.fail(" --pid ".join(["give each pid its own option:", *pids]), param, ctx)
        return super().convert(value, param, ctx)


def job_option(text: str) -> Callable[[Command], Command]:
    """Return the option --job with the help `text`."""
    return click.option("--job", "wanted", help=text)


def pid_option(text: str) -> Callable[[Command], Command]:
    """Return the option --pid with the help `text`."""
    return click.option("--pid", "pids", type=_Pid(1, 1 << 22), multiple=True, help=text)
