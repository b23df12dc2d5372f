"""A diagnosis: what a capture of one job shows, grouped and judged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hangwatch import __version__, config, words
from hangwatch.model import (
    Capture,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    Motion,
    RankId,
    Signature,
    Supplement,
    TimelineEntry,
    Value,
    Verdict,
)
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import environment_diff, judge
from hangwatch.verdict.supplements import complete

if TYPE_CHECKING:
    from hangwatch.explain.logs.merged_logs import RankLog


class Diagnosis(Value, frozen=True):
    """A finished capture of one job with its verdict; `uid` owns all processes in it, see `Job`."""

    capture: Capture
    grouping: Grouping
    verdict: Verdict
    judged_unix_seconds: float
    host_facts: tuple[tuple[str, str], ...] = ()
    uid: int | None = None
    ranks_here: int | None = None
    logs: tuple[RankLog, ...] = ()

    def without_motion_of(self, ranks: Collection[RankId]) -> Diagnosis:
        """The same, judged anew, where other looks tell of these ranks that their lines show no work."""
        if not any(member.id in ranks and member.motion is Motion.MOVING for member in self.grouping.members):
            return self
        groups = tuple(_without_motion_of(group, ranks) for group in self.grouping.groups)
        grouping = replace(self.grouping, groups=groups)
        return replace(self, grouping=grouping, verdict=_verdict(grouping, self.capture, self.ranks_here, self.logs))

    def read_by_owner(self, job: Job) -> Job:
        """This job, with a uid only where that user may read all that is in this look: a process can become another."""
        return job if job.uid == self.uid else replace(job, uid=None)

    def incident(self, job: Job, state: JobState, timeline: tuple[TimelineEntry, ...] = ()) -> Incident:
        """The incident that begins with this look; `job` and `state` are what is known of the job by now."""
        return Incident(
            incident_id=words.incident_name(job, self.judged_unix_seconds),
            node=self.capture.node,
            job=self.read_by_owner(job),
            opened_unix_seconds=self.judged_unix_seconds,
            state=state,
            verdict=self.verdict,
            grouping=self.grouping,
            captures=(self.capture,),
            timeline=timeline,
            host_facts=self.host_facts,
            hangwatch_version=__version__,
        )


def diagnose(
    taken: Capture,
    settings: config.Capture,
    activities: Table,
    *,
    unix_now: float,
    host_facts: tuple[tuple[str, str], ...] = (),
    ranks_here: int | None = None,
    logs: tuple[RankLog, ...] = (),
) -> Diagnosis:
    """Pure: what a capture shows; of so many ranks that the job should have on this node, else of those captured."""
    grouping = group_ranks(taken, activities, settings)
    return Diagnosis(
        capture=taken,
        grouping=grouping,
        verdict=_verdict(grouping, taken, ranks_here, logs),
        judged_unix_seconds=unix_now,
        host_facts=host_facts,
        ranks_here=ranks_here,
        logs=logs,
    )


def _verdict(grouping: Grouping, taken: Capture, ranks_here: int | None, logs: Sequence[RankLog]) -> Verdict:
    here = ranks_here or len(taken.ranks)
    verdict = judge.judge(grouping, here)
    if logs:
        from hangwatch.explain.logs import log_evidence

        verdict = complete(verdict, log_evidence.supplement_of_live_job(logs, here))
    if taken.environment is not None:
        differences = environment_diff.as_evidence(taken.environment, (*verdict.named, *verdict.first_look))
        verdict = complete(verdict, Supplement(evidence=tuple(differences)))
    return verdict


def _without_motion_of(group: Group, ranks: Collection[RankId]) -> Group:
    unknown = Signature.UNKNOWN
    members = (
        replace(one, signature=unknown, motion=unknown.motion) if one.id in ranks else one for one in group.members
    )
    return replace(group, members=tuple(members))
