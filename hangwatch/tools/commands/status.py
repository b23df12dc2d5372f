"""`hangwatch status`: the GPUs, jobs and checks that the daemon on this node monitors."""

import json
from pathlib import Path

import click

from hangwatch.cli import screen
from hangwatch.cli.options import config_option, url_option


@click.command(short_help="Show the GPUs, jobs and checks of this node's daemon.")
@config_option
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print the JSON of /status, see docs/json.md.")
def status(config_path: Path | None, url: str | None, as_json: bool) -> None:
    """Show GPUs, jobs and checks, as the daemon on this node sees them."""
    from hangwatch.cli.config_choice import settings_from  # what runs the command is imported only to run it
    from hangwatch.tools.commands.status_client import decode_status, fetch_status
    from hangwatch.tools.commands.status_tables import status_text

    settings, source = settings_from(config_path)
    answer = fetch_status(settings, source, url)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(status_text(decode_status(answer)), color=screen.is_colored())


COMMANDS = (status,)
