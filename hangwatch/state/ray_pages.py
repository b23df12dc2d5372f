"""One page for each Ray job: its worker groups are jobs of their own, which wait for each other. Pure."""

from collections import defaultdict

from msgspec.structs import replace

from hangwatch.state.board import JobEntry, Snapshot


def page_ray_jobs_once(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with at most one page for each Ray job.

    The group that already pages in the snapshot `before` pages, else one with a named rank, else the group that was
    hung first.
    """
    paging = {entry.job.key for entry in before.living if entry.page}
    groups: defaultdict[tuple[str, str], list[JobEntry]] = defaultdict(list)
    for entry in snapshot.living:
        if entry.page and entry.job.launcher == "ray" and entry.job.job_name:
            groups[entry.job.share, entry.job.job_name].append(entry)
    for entries in groups.values():
        entries.sort(key=lambda entry: (entry.job.key not in paging, not _names_rank(entry), entry.watch.since))
        for other in entries[1:]:
            snapshot = snapshot.with_job(replace(other, page=False))
    return snapshot


def _names_rank(entry: JobEntry) -> bool:
    return entry.incident is not None and bool(entry.incident.verdict.named)
