"""An Incident -> the files that stand beside incident.json in its folder."""

from __future__ import annotations

from hangwatch.model import Incident
from hangwatch.report import html, text
from hangwatch.report.dump_text import dump_files


def folder_files(incident: Incident) -> dict[str, str]:
    """The report as text and as a page, and every dump, by path: for `store.save`."""
    return {"report.txt": text.render(incident), "report.html": html.render(incident), **dump_files(incident)}
