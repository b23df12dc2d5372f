"""The subjects of the daemon's metrics (what a scrape sees, a job, a rank, an incident), and texts of their labels."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.checks.framework.contract import JOB, Labels
from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.config import Detector
from hangwatch.detector.progress_gaps import RankProgress
from hangwatch.model import Incident, JobName, Rank, RankId
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.wording.short_paths import shorten_paths

LABEL_LENGTH = 200
NAMED_RANKS_SHOWN = 16
MOST_FINGERPRINTS = 20


def number_text(number: int | None) -> str:
    """Return a number as a label; "" if it is unknown."""
    return "" if number is None else str(number)


def sentence_label(text: str) -> str:
    """Return a sentence as a label. A long sentence is cut between two words, never inside a number."""
    text = words.printable(text)
    if len(text) <= LABEL_LENGTH:
        return text
    cut = text[:LABEL_LENGTH]
    return f"{cut.rpartition(' ')[0].rstrip(' ,;:') or cut[:-1]}…"


def yes_or_no(fact: bool) -> str:
    """Return "yes" or "no", as a label."""
    return "yes" if fact else "no"


def ranks_label(ranks: Sequence[RankId], node: str) -> str:
    """Return ranks as a label: `node:rank` for at most 16 of them, then the number of further ranks."""
    names = [
        f"{rank_id.node or node}:{number_text(rank_id.rank if rank_id.rank is not None else rank_id.local_rank)}"
        for rank_id in ranks
    ]
    more = len(names) - NAMED_RANKS_SHOWN
    return ",".join(names[:NAMED_RANKS_SHOWN]) + (f",+{more}" if more > 0 else "")


class View(NamedTuple):
    """A snapshot of the board, the time of the scrape (CLOCK_MONOTONIC, seconds), and settings."""

    snapshot: Snapshot
    now: float
    settings: Detector
    external_url: str = ""


class JobView(NamedTuple):
    """A job on this node, in one scrape."""

    job: JobName
    entry: JobEntry
    view: View


class RankView(NamedTuple):
    """A rank of a job on this node. `progress` and `order` are None if its collectives were not counted or compared."""

    job: JobName
    rank: Rank
    progress: RankProgress | None
    order: ArrivalOrder | None


class IncidentView(NamedTuple):
    """An open incident, or a crash. A fingerprint beyond the limit is "": a user can make many."""

    job: JobName
    incident: Incident
    external_url: str
    fingerprint: str = ""

    @property
    def url(self) -> str:
        """The URL of the incident's report; "" if [http] external_url is not set."""
        base = self.external_url.replace("{node}", self.incident.node).rstrip("/")
        return f"{base}/incidents/{self.incident.incident_id}" if base else ""

    def shorten(self, text: str) -> str:
        """Return a text of the incident with short paths."""
        return shorten_paths(text, self.incident.grouping)


RANK: Labels = {
    **JOB,
    "rank": lambda each: number_text(each.rank.rank),
    "local_rank": lambda each: number_text(each.rank.local_rank),
}
"""The labels of a metric about a rank."""


def list_ranks(view: View) -> Iterator[RankView]:
    """Yield the ranks of each job that has not ended."""
    for entry in view.snapshot.living:
        name, progress = entry.job.name, entry.watch.progress.ranks
        yield from (RankView(name, rank, progress.get(rank.id), entry.arrival_order) for rank in entry.job.ranks)


def list_incidents(view: View) -> Iterator[IncidentView]:
    """Yield each open incident."""
    incidents = {
        entry.job.name: entry.open_incident for entry in view.snapshot.jobs.values() if entry.open_incident is not None
    }
    unique = dict.fromkeys(incident.verdict.fingerprint for incident in incidents.values())
    fingerprints = frozenset(itertools.islice(unique, MOST_FINGERPRINTS))
    for job, incident in incidents.items():
        mark = incident.verdict.fingerprint
        yield IncidentView(job, incident, view.external_url, mark if mark in fingerprints else "")
