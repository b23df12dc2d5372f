"""How `explain` and `merge` say what they found: as text, JSON or a page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hangwatch.cli.files import write_text
from hangwatch.model import Grouping, Job, Verdict
from hangwatch.report import as_json, html, text

html_option = click.option(
    "--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as one page."
)
json_option = click.option("--json", "as_json_form", is_flag=True, help="Print JSON, as docs/json.md describes it.")


def print_answer(
    grouping: Grouping, verdict: Verdict, job: Job | None, as_json_form: bool, html_path: Path | None
) -> None:
    """Print the verdict on groups as text or JSON; as a page, too, where one is asked for."""
    if html_path is not None:
        write_text(html_path, html.render_grouping(grouping, verdict))
    if as_json_form:
        click.echo(as_json.render(as_json.answer(grouping, verdict, job)), nl=False)
    else:
        click.echo(text.render_verdict(grouping, verdict, color=sys.stdout.isatty()), nl=False)
