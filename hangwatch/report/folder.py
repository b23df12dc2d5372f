"""The files of an incident's folder, except incident.json."""

from hangwatch.model import Incident
from hangwatch.report import html, text
from hangwatch.report.dump_text import dump_files


def render_files(incident: Incident) -> dict[str, str]:
    """Return the text of each file by its path: the reports as text and HTML, and every dump.

    `store.save` writes them.
    """
    return {"report.txt": text.render(incident), "report.html": html.render(incident), **dump_files(incident)}
