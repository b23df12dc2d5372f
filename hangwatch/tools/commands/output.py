"""Output of verdicts as text, JSON or an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hangwatch.cli import screen
from hangwatch.model import Grouping, Job, Verdict
from hangwatch.report import as_json, html, text
from hangwatch.tools.commands.output_files import write_page

if TYPE_CHECKING:
    from hangwatch.tools.fleet.node_replies import ReplyCollector


def print_answer(
    grouping: Grouping, verdict: Verdict, job: Job | None, as_json_form: bool, html_path: Path | None
) -> None:
    """Print a verdict as text or JSON, and write the HTML page if there is a path for it."""
    if html_path is not None:
        write_page(html_path, html.render_grouping(grouping, verdict))
    if as_json_form:
        click.echo(as_json.render(as_json.answer(grouping, verdict, job)), nl=False)
    else:
        screen.show(verdict_text(grouping, verdict))


def verdict_text(grouping: Grouping, verdict: Verdict) -> str:
    """Render a verdict as text for standard output."""
    return text.render_verdict(grouping, verdict, color=screen.is_colored(), width=screen.width())


def print_nodes_answer(form: type[as_json.NodesAnswer], replies: ReplyCollector[Any], **others: object) -> None:
    """Print an answer as JSON: its other fields, and the nodes that responded, failed, or did not respond."""
    fields: dict[str, Any] = {
        "schema_version": as_json.SCHEMA_VERSION,
        "answered": tuple(sorted(replies.answered)),
        "unanswered": tuple(sorted(replies.silent)),
        "failed": tuple(as_json.FailedNodes(nodes=tuple(sorted(nodes)), reason=why) for why, nodes in replies.failed),
    }
    click.echo(as_json.render(form(**(fields | others))), nl=False)
