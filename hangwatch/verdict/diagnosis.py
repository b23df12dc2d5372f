"""A diagnosis: the capture of one job, its groups of ranks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    Member,
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
from hangwatch.verdict.judge import complete
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.scene import OPENS_FIFO, lock_holder, process_of
from hangwatch.verdict.sequence_rules import decide_by_records

if TYPE_CHECKING:
    from hangwatch.logs.merged_logs import RankLog


class Diagnosis(Value, frozen=True):
    """The capture of one job with its groups of ranks and its verdict.

    `uid` is the owner of all captured processes, None if they have several owners. `ranks_here` is the number of the
    job's ranks on this node, None if only the captured ranks are known.
    """

    capture: Capture
    grouping: Grouping
    verdict: Verdict
    judged_unix_seconds: float
    host_facts: tuple[tuple[str, str], ...] = ()
    uid: int | None = None
    ranks_here: int | None = None
    logs: tuple[RankLog, ...] = ()

    def without_motion_of(self, ranks: Collection[RankId]) -> Diagnosis:
        """Judge the capture again as if the motion of `ranks` were unknown. Return the new diagnosis.

        The caller has seen in other captures that these ranks do no work, although their stacks change.
        """
        if not any(member.id in ranks and member.motion is Motion.MOVING for member in self.grouping.members):
            return self
        return self._judge_again(lambda _, member: _remove_motion(member) if member.id in ranks else member)

    def with_sleepers(self, polling: Collection[RankId], asleep: Collection[RankId]) -> Diagnosis:
        """Judge the capture again: `polling` ranks do not progress, and the motion of `asleep` ranks is unknown.

        Exception: a rank in `asleep` keeps its motion if its flight recorder shows an operation that stays open.
        """
        return self._judge_again(lambda _, member: _mark_sleep(member, polling, asleep))

    def without_busy_gpus(self, least_ratio: float) -> Diagnosis:
        """Judge the capture again, of a job without new collectives: the power of its GPUs proves less.

        The motion of a rank is unknown if it waits for a GPU above `least_ratio` of the way from floor to busy level
        (or for ranks, while its GPU works).
        """
        return self._judge_again(
            lambda group, member: (
                replace(member, motion=Motion.UNKNOWN) if _has_busy_gpu(group, member, least_ratio) else member
            )
        )

    def _judge_again(self, change: Callable[[Group, Member], Member]) -> Diagnosis:
        grouping = self.grouping.change_members(change)
        if grouping == self.grouping:
            return self
        return replace(self, grouping=grouping, verdict=_judge(grouping, self.capture, self.ranks_here, self.logs))

    def hide_from_other_users(self, job: Job) -> Job:
        """Return the job with its uid only if this user owns all captured processes. Else return it without a uid.

        A process can change its user, so a capture may contain processes of other users.
        """
        return job if job.uid == self.uid else replace(job, uid=None)

    def incident(
        self, job: Job, state: JobState, timeline: tuple[TimelineEntry, ...] = (), quiet_seconds: float = 0.0
    ) -> Incident:
        """Return a new incident of a job without progress for `quiet_seconds`, or since its last progress.

        The later of these two times counts; `timeline` has the last progress. `job` and `state` are the newest known.
        """
        progress = (line.unix_seconds for line in timeline if line.state in (JobState.TRAINING, JobState.RECOVERED))
        opened = min(self.judged_unix_seconds, max(self.judged_unix_seconds - quiet_seconds, *progress, 0.0))
        before = [line for line in timeline if line.unix_seconds < opened]
        if before:
            start = TimelineEntry(unix_seconds=opened, state=before[-1].state, message="the last progress of the job")
            timeline = (*before, start, *timeline[len(before) :])
        return Incident.copy_from(
            self,
            incident_id=words.incident_name(job, opened),
            node=self.capture.node,
            job=self.hide_from_other_users(job),
            opened_unix_seconds=opened,
            state=state,
            captures=(self.capture,),
            timeline=timeline,
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
    """Group the ranks of a capture, judge them, and return the diagnosis.

    `ranks_here` is the number of the job's ranks on this node; None if only the captured ranks are known.
    """
    grouping = with_frozen_ranks(group_ranks(taken, activities, settings))
    return Diagnosis(
        capture=taken,
        grouping=grouping,
        verdict=_judge(grouping, taken, ranks_here, logs),
        judged_unix_seconds=unix_now,
        host_facts=host_facts,
        ranks_here=ranks_here,
        logs=logs,
    )


def _judge(grouping: Grouping, taken: Capture, ranks_here: int | None, logs: Sequence[RankLog]) -> Verdict:
    here = ranks_here or len(taken.ranks)
    verdict = judge.judge(grouping, here)
    if logs:
        from hangwatch.logs import log_evidence

        verdict = complete(verdict, log_evidence.supplement_of_live_job(logs, here))
    if taken.environment is not None:
        differences = environment_diff.as_evidence(taken.environment, (*verdict.named, *verdict.check_first))
        verdict = complete(verdict, Supplement(evidence=tuple(differences)))
    return verdict if verdict.named else with_action(verdict, grouping)


def _mark_sleep(member: Member, polling: Collection[RankId], asleep: Collection[RankId]) -> Member:
    sleep = member.stack.sleep
    if member.id in polling and sleep is not None:
        stack = replace(member.stack, sleep=replace(sleep, is_polling=True))
        return replace(member, motion=Motion.FROZEN, stack=stack)
    is_judged = member.signature is Signature.BLOCKED and not any(member.recorder.open_operations)
    return replace(member, motion=Motion.UNKNOWN) if member.id in asleep and is_judged else member


def _has_busy_gpu(group: Group, member: Member, least_ratio: float) -> bool:
    ratio, signature = member.gpu.busy_power_ratio, member.signature
    if group.waits_for == "ranks" or any(member.recorder.open_operations):
        return signature is Signature.GPU_WORKS
    waits = signature is Signature.BEHIND_GPU or (group.waits_for == "gpu" and signature is Signature.BLOCKED)
    return waits and ratio is not None and ratio > least_ratio


def _remove_motion(member: Member) -> Member:
    """Return the member with unknown motion. It keeps its signature only if it was measured transferring bytes."""
    is_carrying = member.stack.stay is not None and member.stack.stay.carries
    signature = member.signature if is_carrying else Signature.UNKNOWN
    return replace(member, signature=signature, motion=Motion.UNKNOWN)


_ASLEEP_RATIO = 0.1  # of a core; a rank that tries a collective again sleeps in it


def with_frozen_ranks(grouping: Grouping) -> Grouping:
    """Return the groups with the motion that sequence numbers and calls show, where GPUs or lines showed progress.

    At full power a GPU may run a kernel that only waits. A named rank that does not return from one call on an object
    enqueues nothing, so no rank that waits for it completes anything or progresses by trying again. The groups are
    unchanged unless every rank is known, each named rank is held, and another rank may only wait.
    """
    if not any(map(_may_only_wait, grouping.members)):
        return grouping
    answer = decide_by_records(grouping)
    named = [member for member in grouping.members if member.id.rank in answer.named]
    others = frozenset(map(process_of, grouping.members))
    if not named or answer.graph.is_partial or not all(_is_held(each, others) for each in named):
        return grouping
    return grouping.change_members(lambda _, member: _freeze(member, answer.named, answer.graph.waiting))


def _is_held(member: Member, processes: Collection[tuple[str | None, int | None]]) -> bool:
    """True if the main thread never returned from one call: open() of a FIFO, or a wait for a lock or stopped helpers.

    A file may be read from a slow mount, and the process behind a pipe may work: these calls prove nothing. A wait for
    a lock proves nothing if the holder of the lock works.
    """
    call, holder, use = member.kernel.call, lock_holder(member), member.usage
    if use.switches_per_second != 0.0 or (use.cpu_ratio or 0.0) > _ASLEEP_RATIO:
        return False
    if call is not None and call.is_held:
        return True
    opens_fifo = member.waits.object == "file" and member.kernel.wchan in OPENS_FIFO
    return opens_fifo or (holder is not None and holder[1] is not None and holder not in processes)


def _may_only_wait(member: Member) -> bool:
    """True if only the power of its GPU shows progress of a rank, or only the lines of a main thread that sleeps."""
    sleeps = member.usage.main_cpu_ratio is not None and member.usage.main_cpu_ratio < _ASLEEP_RATIO
    return member.signature is Signature.GPU_WORKS or (member.signature is Signature.COMPUTES and sleeps)


def _freeze(member: Member, named: Collection[int], waiting: Collection[int]) -> Member:
    if member.id.rank in named:
        return replace(member, motion=Motion.FROZEN, signature=Signature.BLOCKED)
    if member.id.rank in waiting and _may_only_wait(member):
        does = Signature.BEHIND_GPU if member.signature is Signature.GPU_WORKS else Signature.POLLS
        return replace(member, motion=Motion.FROZEN, signature=does)
    return member
