"""Limits on the monitored jobs and ranks of each owner. Pure.

Processes of one user must not displace another user's job. Jobs that the driver lists on a GPU come first, then
jobs with ranks, then older jobs. Environments do not count, because users can write them. The scan reports what
exceeds a limit.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from hangwatch import config
from hangwatch.jobs.membership import Membership
from hangwatch.jobs.process_tree import Tree
from hangwatch.model import GpuSample, NotMonitored, list_by_key

OWNERS_NAMED = 16
OTHERS = "others"


def apply_limits(
    memberships: Sequence[Membership], tree: Tree, samples: Sequence[GpuSample], limits: config.Jobs
) -> tuple[list[Membership], tuple[NotMonitored, ...]]:
    """Return the jobs to monitor, with at most `max_ranks_per_job` ranks each, and the counts of the rest by owner."""
    holders = tree.gpu_holders(samples)
    trimmed = [_trimmed(membership, holders, limits.max_ranks_per_job) for membership in memberships]
    chosen = _chosen(trimmed, holders, limits)
    left_out = []
    for place, membership in enumerate(memberships):
        ranks = len(membership.members) - (len(trimmed[place].members) if place in chosen else 0)
        if ranks or place not in chosen:
            left_out.append(NotMonitored(owner=membership.owner.share, jobs=int(place not in chosen), ranks=ranks))
    return [trimmed[place] for place in sorted(chosen)], fold_by_owner(left_out)


def fold_by_owner(left_out: Sequence[NotMonitored]) -> tuple[NotMonitored, ...]:
    """Return an entry per owner, the most ranks first; after 16 one for all others, as a user may have many uids."""
    by_owner = list_by_key((entry.owner, entry) for entry in left_out)
    summed = itertools.starmap(_sum, by_owner.items())
    ordered = sorted(summed, key=lambda entry: (-entry.ranks, -entry.processes, -entry.jobs, entry.owner))
    named, rest = ordered[:OWNERS_NAMED], ordered[OWNERS_NAMED:]
    if rest:
        named.append(_sum(OTHERS, rest))
    return tuple(named)


def _sum(owner: str, entries: Iterable[NotMonitored]) -> NotMonitored:
    counts = zip(*((entry.jobs, entry.ranks, entry.processes) for entry in entries), strict=True)
    jobs, ranks, processes = map(sum, counts)
    return NotMonitored(owner=owner, jobs=jobs, ranks=ranks, processes=processes)


def _chosen(memberships: Sequence[Membership], holders: set[int], limits: config.Jobs) -> set[int]:
    """Return the indexes of the jobs to monitor. Owners take turns: each one's first job precedes any second one."""
    order = sorted(range(len(memberships)), key=lambda place: _precedence(memberships[place], holders))
    jobs, ranks = Counter[object](), Counter[object]()
    turns = []
    for place in order:
        membership = memberships[place]
        is_within = jobs[membership.owner] < limits.max_jobs_per_owner
        if is_within and ranks[membership.owner] + len(membership.members) <= limits.max_ranks_per_owner:
            turns.append((not _holds(membership, holders), jobs[membership.owner], place))
            jobs[membership.owner] += 1
            ranks[membership.owner] += len(membership.members)
    return {place for _, _, place in sorted(turns)[: limits.max_jobs]}


def _precedence(membership: Membership, holders: set[int]) -> tuple[bool, bool, int, int]:
    return (
        not _holds(membership, holders),
        not membership.members,
        membership.began_ticks,
        membership.processes[0].id.pid,
    )


def _holds(membership: Membership, holders: set[int]) -> bool:
    return any(process.id.pid in holders for process, _ in membership.members)


def _trimmed(membership: Membership, holders: set[int], most: int) -> Membership:
    if len(membership.members) <= most:
        return membership
    first = sorted(
        range(len(membership.members)), key=lambda at: (membership.members[at][0].id.pid not in holders, at)
    )[:most]
    note = f"{most} of {len(membership.members):,} ranks on this node are monitored: max_ranks_per_job is {most}"
    return membership._replace(
        members=[membership.members[at] for at in sorted(first)], notes=(*membership.notes, note)
    )
