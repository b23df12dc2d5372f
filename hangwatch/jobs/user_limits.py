"""Limits on the monitored jobs and ranks of each owner. Pure.

Processes of one user must not displace another user's job. Jobs that the driver lists on a GPU come first, then
jobs with ranks, then older jobs. Environments do not count, because users can write them. The scan reports what
exceeds a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hangwatch import config
from hangwatch.jobs.membership import Membership
from hangwatch.jobs.process_tree import Tree
from hangwatch.model import GpuSample, NotMonitored

OWNERS_NAMED = 16
OTHERS = "others"


def apply_limits(
    crews: Sequence[Membership], tree: Tree, samples: Sequence[GpuSample], limits: config.Jobs
) -> tuple[list[Membership], tuple[NotMonitored, ...]]:
    """Return the jobs to monitor, with at most `max_ranks_per_job` ranks each, and the counts of the rest by owner."""
    holders = _holders(tree, samples)
    trimmed = [_trimmed(crew, holders, limits.max_ranks_per_job) for crew in crews]
    jobs, ranks = Counter[str](), Counter[str]()
    for crew, kept in zip(crews, trimmed, strict=True):
        ranks[crew.owner.share] += len(crew.members) - len(kept.members)
    chosen = _chosen(trimmed, holders, limits)
    for place, crew in enumerate(trimmed):
        if place not in chosen:
            jobs[crew.owner.share] += 1
            ranks[crew.owner.share] += len(crew.members)
    owners = [owner for owner in ranks if ranks[owner] or jobs[owner]]
    left_out = [NotMonitored(owner=owner, jobs=jobs[owner], ranks=ranks[owner]) for owner in owners]
    return [crew for place, crew in enumerate(trimmed) if place in chosen], fold_by_owner(left_out)


def fold_by_owner(left_out: Sequence[NotMonitored]) -> tuple[NotMonitored, ...]:
    """Return one entry per owner, the owner with the most ranks first.

    All owners after the first 16 are one entry, because a user may have many uids.
    """
    by_owner: dict[str, NotMonitored] = {}
    for entry in left_out:
        before = by_owner.get(entry.owner, NotMonitored(owner=entry.owner))
        by_owner[entry.owner] = NotMonitored(
            owner=entry.owner,
            jobs=before.jobs + entry.jobs,
            ranks=before.ranks + entry.ranks,
            processes=before.processes + entry.processes,
        )
    ordered = sorted(by_owner.values(), key=lambda entry: (-entry.ranks, -entry.processes, -entry.jobs, entry.owner))
    named, rest = ordered[:OWNERS_NAMED], ordered[OWNERS_NAMED:]
    if rest:
        sums = {name: sum(getattr(entry, name) for entry in rest) for name in ("jobs", "ranks", "processes")}
        named.append(NotMonitored(owner=OTHERS, **sums))
    return tuple(named)


def _chosen(crews: Sequence[Membership], holders: set[int], limits: config.Jobs) -> set[int]:
    """Return the indexes of the jobs to monitor.

    Owners take turns, so each owner's first job comes before any second one.
    """
    order = sorted(range(len(crews)), key=lambda place: _precedence(crews[place], holders))
    jobs, ranks = Counter[object](), Counter[object]()
    turns = []
    for place in order:
        crew = crews[place]
        is_within = jobs[crew.owner] < limits.max_jobs_per_owner
        if is_within and ranks[crew.owner] + len(crew.members) <= limits.max_ranks_per_owner:
            turns.append((not _holds(crew, holders), jobs[crew.owner], place))
            jobs[crew.owner] += 1
            ranks[crew.owner] += len(crew.members)
    return {place for _, _, place in sorted(turns)[: limits.max_jobs]}


def _precedence(crew: Membership, holders: set[int]) -> tuple[bool, bool, int, int]:
    return not _holds(crew, holders), not crew.members, crew.began_ticks, crew.processes[0].id.pid


def _holds(crew: Membership, holders: set[int]) -> bool:
    return any(process.id.pid in holders for process, _ in crew.members)


def _holders(tree: Tree, samples: Sequence[GpuSample]) -> set[int]:
    """Return the pids of the processes that hold a GPU, and of their ancestors."""
    return tree.with_ancestors(pid for gpu in samples for pid in gpu.pids)


def _trimmed(crew: Membership, holders: set[int], most: int) -> Membership:
    if len(crew.members) <= most:
        return crew
    first = sorted(range(len(crew.members)), key=lambda at: (crew.members[at][0].id.pid not in holders, at))[:most]
    note = f"{most} of {len(crew.members):,} ranks on this node are monitored: max_ranks_per_job is {most}"
    return crew._replace(members=[crew.members[at] for at in sorted(first)], notes=(*crew.notes, note))
