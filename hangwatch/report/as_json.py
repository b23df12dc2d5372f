"""The JSON documents that `explain`, `merge` and `dump` print, see docs/json.md."""

from collections.abc import Iterable

import msgspec

from hangwatch.model import (
    Capture,
    Fault,
    Group,
    Grouping,
    Incident,
    Job,
    JobName,
    Motion,
    RankId,
    Stack,
    Value,
    Verdict,
)
from hangwatch.report.phrases import group_ids, notes
from hangwatch.stacks.user_code import split_by_line
from hangwatch.verdict.wording.next_steps import next_step

SCHEMA_VERSION = 2  # 2: the dumps of a capture have parts
"""The version of `Answer` and `Dump`. It increases if a field is removed or changes its meaning, not for new ones."""


class JobHead(JobName, frozen=True):
    """The job of an answer. `job_key` is equal on all nodes. The kernel reports the `owner`. `user` may be null."""

    launcher: str
    owner: str
    user: str | None
    command: str


class StackForm(Value, frozen=True):
    """The stack of another thread or of a worker process of the rank that represents a group."""

    name: str
    activity: str
    frames: tuple[str, ...]


class PartForm(Value, frozen=True):
    """The ranks of a group that are at the same lines of the user's code. `frames` contain these lines."""

    ranks: tuple[int, ...]
    members: tuple[RankId, ...]
    frames: tuple[str, ...]


class GroupForm(Value, frozen=True):
    """A group of ranks with the same stack. `ranks` are the known global ranks, `members` all ranks of the group.

    `frames` have the form "function (file:line)", innermost first. If there is no stack, `fault` is set instead. `gone`
    is true if the processes do not exist. `parts` is empty if all ranks are at the same lines of the user's code.
    """

    ranks: tuple[int, ...]
    members: tuple[RankId, ...]
    nodes: tuple[str, ...]
    activity: str
    operation: str | None
    waits: bool
    waits_for: str
    phase: str | None
    motion: Motion
    frames: tuple[str, ...]
    threads: tuple[StackForm, ...]
    workers: tuple[StackForm, ...]
    fault: Fault | None
    gone: bool
    parts: tuple[PartForm, ...]


class Answer(Value, frozen=True):
    """The verdict on one job, with its groups of ranks.

    `absent` are the ranks that should exist and did not respond, as [first, last] of each range. `job` is null if the
    input was only dumps. `capture` contains every stack of every round, as in incident.json. It is null except in
    `dump`. `next_step` tells people the first step to take after this kind of verdict.
    """

    schema_version: int
    job: JobHead | None
    verdict: Verdict
    groups: tuple[GroupForm, ...]
    absent: tuple[tuple[int, int], ...]
    world_size: int | None
    notes: tuple[str, ...]
    capture: Capture | None
    next_step: str


class Dump(Value, frozen=True):
    """The output of `hangwatch dump --json`: an answer for each job on this node."""

    schema_version: int
    node: str
    jobs: tuple[Answer, ...]


class FailedNodes(Value, frozen=True):
    """Nodes that could be reached but failed, and the reason."""

    nodes: tuple[str, ...]
    reason: str


class NodesAnswer(Value, frozen=True):
    """An answer about many nodes: those that responded, did not respond, or failed."""

    schema_version: int
    answered: tuple[str, ...]
    unanswered: tuple[str, ...]
    failed: tuple[FailedNodes, ...]


class NodesDump(NodesAnswer, frozen=True):
    """The output of `hangwatch dump --nodes ... --json`: an answer for each job on the nodes.

    `without_job` are the `answered` nodes without a job. `unanswered` nodes did not respond by the deadline, or could
    not be reached.
    """

    without_job: tuple[str, ...]
    jobs: tuple[Answer, ...]


def answer(grouping: Grouping, verdict: Verdict, job: Job | None = None, capture: Capture | None = None) -> Answer:
    """Return the JSON form of a verdict on one job. `job` and `capture` are None if the input was only dumps."""
    return Answer(
        schema_version=SCHEMA_VERSION,
        job=None if job is None else JobHead.copy_from(job),
        verdict=verdict,
        groups=tuple(_group(group) for group in grouping.groups),
        absent=tuple((ranks.start, ranks.stop - 1) for ranks in grouping.absent),
        world_size=grouping.world_size,
        notes=notes(grouping),
        capture=capture,
        next_step=next_step(verdict),
    )


def dump(node: str, incidents: Iterable[Incident]) -> Dump:
    """Return the JSON form of the jobs that were dumped on this node, with their stacks."""
    return Dump(
        schema_version=SCHEMA_VERSION,
        node=node,
        jobs=tuple(
            answer(incident.grouping, incident.verdict, incident.job, incident.captures[-1]) for incident in incidents
        ),
    )


def render(form: Value) -> str:
    """Return the form as JSON text with a line feed at its end."""
    return msgspec.json.format(msgspec.json.encode(form), indent=1).decode() + "\n"


def _group(group: Group) -> GroupForm:
    parts = split_by_line(group)
    return GroupForm.copy_from(
        _part(group),
        group,
        nodes=tuple(sorted({member.id.node for member in group.members if member.id.node})),
        threads=tuple(map(_stack, group.threads)),
        workers=tuple(map(_stack, group.workers)),
        parts=tuple(map(_part, parts)) if len(parts) > 1 else (),
    )


def _part(group: Group) -> PartForm:
    ids = group_ids(group)
    return PartForm(
        ranks=tuple(rank.rank for rank in ids if rank.rank is not None),
        members=tuple(ids),
        frames=tuple(map(str, group.frames)),
    )


def _stack(stack: Stack) -> StackForm:
    return StackForm(name=stack.name, activity=stack.activity, frames=tuple(map(str, stack.frames)))
