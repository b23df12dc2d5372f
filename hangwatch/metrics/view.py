"""The subjects of the daemon's metrics: what a scrape sees, and a job, a rank or an incident in it."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from hangwatch.checks.framework.contract import JOB, Labels
from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.config import Detector
from hangwatch.detector.progress_gaps import RankProgress
from hangwatch.metrics.texts import number_text
from hangwatch.model import Incident, JobName, Rank
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.wording.short_paths import shorten_paths

MOST_FINGERPRINTS = 20


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


def list_jobs(view: View) -> Iterator[JobView]:
    """Yield each job, also one that has just ended."""
    return (JobView(entry.job.name, entry, view) for entry in view.snapshot.jobs.values())


def list_living(view: View) -> Iterator[JobView]:
    """Yield each job that has not ended."""
    return (JobView(entry.job.name, entry, view) for entry in view.snapshot.living)


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
