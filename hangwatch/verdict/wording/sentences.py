"""The table of sentences: the headline of each finding, and the check that would decide. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from hangwatch.model import Member
from hangwatch.stacks import activity_table
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import check_first_reasons as reasons
from hangwatch.verdict.wording import clauses, job_headlines, rank_headlines, stuck_on
from hangwatch.verdict.wording import sequence_numbers as numbers
from hangwatch.verdict.wording.group_text import describe_each, others_wait

Text: TypeAlias = Callable[[Finding], str]


class Row(NamedTuple):
    """The headline of a finding, or the reason to check its ranks first, and the check that would decide."""

    headline: Text
    settle: str | Text = ""


_OWN_CODE = "check what it does there, and if that ends by itself"
_BRANCH = "find the next call of each side, and its group: a branch, a step or a group differs"
_ITS_GPU = (
    "check that GPU: its XIDs in the kernel log, the errors of its links (`nvidia-smi nvlink -e`) and of the network "
    "adapter next to it, and the kernel that its stream is in"
)
_DUMP_WORKERS = (
    "dump the processes for which they wait, too: on an inference server, the workers of the GPUs; an idle server has "
    "such stacks"
)
_LOOP = (
    "check what should give that loop work, or end it (a service without requests is idle); sequence numbers cannot "
    "show a rank that has not joined"
)
_SEQUENCE_NUMBERS = (
    "compare sequence numbers (flight recorder, NCCL RAS): which rank is a call behind, or in another branch or group?"
)
_NUMBERS_BELOW = (
    "find the next call of each side (a branch, a step or a group differs); the sequence numbers in the evidence show "
    "which rank has joined which collective"
)
_BEHIND_CALL = "check the file, peer, process or lock of its call (see the evidence)"
_SECOND_DUMP = "take a second dump 10 s later and give both: they show if it moves"
_SLOW_CALL = "check if that call returns: its file system or service, and state (D is blocked) and wchan of the rank"


def _compare_numbers(finding: Finding) -> str:
    """Return the hint to compare sequence numbers. The text depends on whether the evidence already contains them."""
    return _NUMBERS_BELOW if finding.scene.has_numbers else _SEQUENCE_NUMBERS


def _look_at(finding: Finding) -> str:
    """Return the check that the table of activities gives for the activity of the suspects."""
    said = activity_table.find_activity(finding.suspects[0].activity).look_at
    return f"{said[:1].lower()}{said[1:]}".rstrip(".") if said else _SLOW_CALL


def _show_native_frames(members: Sequence[Member]) -> str:
    """Return the command that shows the native frames (below Python) of the first of these ranks."""
    pids = [member.id.pid for member in members if member.id.pid is not None]
    command = f"`hangwatch dump --native{f' --pid {pids[0]}' if pids else ''}`"
    if all(member.is_measured for member in members):
        return f"{command} shows its call below Python"
    again = f"{_SECOND_DUMP}; " if all(member.rounds == 1 for member in members) else ""
    return f"{again}if it still runs, {command} on its host shows its call below Python"


def _find_blocking_call(finding: Finding) -> str:
    """Return the step to find why the suspects sleep or block, or the command that shows native frames if unknown."""
    if finding.suspects[0].frames and clauses.describe_sleep(finding.suspects[0]):
        return stuck_on.look_at_line(finding.suspects[0], finding.members[0])
    untold = [member for member in finding.members if not any(call.has_object for call in member.kernel.calls)]
    return _show_native_frames(untold) if untold else stuck_on.look_at(finding.members[0]) or _BEHIND_CALL


def _check_worker(finding: Finding) -> str:
    """Return the check that shows if a rank still waits for the worker process that it has lost."""
    is_told = all(member.kernel.tells_object for member in finding.members)
    shown = "its call in the evidence" if is_told else "`hangwatch dump --native`"
    return f"check if it still waits for that worker: {shown}, and its log"


SENTENCES: dict[str, Row] = {
    # the whole job works, is idle or has not begun
    "Moving": Row(job_headlines.moving),
    "NoHangSeen": Row(job_headlines.no_hang_seen),
    "Suspended": Row(job_headlines.suspended),
    "Over": Row(
        lambda finding: (
            "no rank uses a connection to another rank or waits for one: training is over, pauses, or has not begun"
            f"{''.join('; ' + doing for doing in describe_each(finding.others))}."
        )
    ),
    "Serving": Row(
        lambda finding: (
            "all ranks are idle and wait for requests: an inference server, not a training job; "
            f"{'; '.join(describe_each(finding.others))}."
        )
    ),
    "NoTask": Row(job_headlines.no_task),
    "NoRanks": Row(job_headlines.no_ranks),
    # by sequence numbers
    "NotJoined": Row(numbers.not_joined, _OWN_CODE),
    "ends": Row(numbers.ends, _OWN_CODE),
    "GpuBehind": Row(numbers.ends, _ITS_GPU),
    "AllJoined": Row(numbers.all_joined, _ITS_GPU),
    "still_open": Row(numbers.still_open),
    "Cycle": Row(numbers.cycle, _BRANCH),
    "Mismatch": Row(numbers.mismatch, _BRANCH),
    "Contradiction": Row(numbers.contradiction, _OWN_CODE),
    "RecordsOnly": Row(numbers.records_only),
    # ranks that are named
    "RankGone": Row(rank_headlines.gone),
    "RankBlocked": Row(rank_headlines.blocked),
    "RankStopped": Row(rank_headlines.stopped),
    "HelperStopped": Row(rank_headlines.held_up),
    "RankUndumpable": Row(rank_headlines.undumpable),
    "MasterRefused": Row(rank_headlines.master_not_listening),
    "OutsideCollective": Row(rank_headlines.outside),
    # reasons to check ranks first
    "stopped": Row(reasons.stopped, lambda finding: stuck_on.look_at(finding.members[0])),
    "died": Row(
        lambda finding: f"it has ended{rank_headlines.why_gone(finding.members)}",
        "check if the others wait for it (a job that has lost a rank stops at its next collective or shared lock)",
    ),
    "hung_task": Row(
        lambda finding: (
            "according to the kernel log, one of its threads has been blocked in the kernel (state D) for minutes, and "
            f"still is; {others_wait(finding.others)}"
        ),
        "`dmesg -T | grep -A20 'blocked for more'` shows its call in the kernel; then `hangwatch check storage`",
    ),
    "lost_worker": Row(reasons.lost_worker, _check_worker),
    "holds_lock": Row(
        reasons.holds_lock,
        "check if it can continue without them: a collective inside a lock that each rank takes never ends",
    ),
    "lock_file": Row(
        reasons.differs_from_others,
        "`lslocks` lists file locks; a lock file that no live process holds is stale: remove it",
    ),
    "awaits_thread": Row(
        reasons.differs_from_others, "check what that thread does: it may wait for another rank itself"
    ),
    "awaits_threads": Row(
        reasons.differs_from_others,
        "find out which of these threads it waits for, and what that thread does",
    ),
    "without_a_thread": Row(reasons.without_a_thread, _find_blocking_call),
    "other_line": Row(reasons.other_line, _compare_numbers),
    "other_collective": Row(reasons.differs_from_others, _compare_numbers),
    "other_activity": Row(reasons.differs_from_others, _look_at),
    "differs": Row(reasons.differs_from_others, _find_blocking_call),
    "awaits_orders": Row(
        reasons.awaits_orders,
        "check the last order that it received; sequence numbers cannot show a rank that has not joined",
    ),
    "idles_in_loop": Row(reasons.has_not_joined, _LOOP),
    "awaits_process": Row(reasons.has_not_joined, _look_at),
    "low_power": Row(reasons.low_power, _find_blocking_call),
    # no rank can be named
    "MountSilent": Row(job_headlines.mount_silent),
    "WrongInterface": Row(job_headlines.wrong_interface),
    "refused": Row(job_headlines.refused),
    "AllWaiting": Row(job_headlines.at_one_place),
    "AllAlike": Row(job_headlines.at_one_place),
    "roles": Row(job_headlines.roles),
    "at_different_lines": Row(job_headlines.at_different_lines),
    "at_different_places": Row(job_headlines.mismatch),
    "servers": Row(job_headlines.servers, _DUMP_WORKERS),
    "CannotTell": Row(job_headlines.cannot_tell),
}
"""The rows by kind of finding, or by `Finding.sentence`, if a kind has several headlines."""

_ONE_MOMENT = "This is the state at the moment when torch wrote its dumps."
CAVEATS = {
    "": "",
    "one_moment": f" {_ONE_MOMENT}",
    "healthy_job_too": f" {_ONE_MOMENT} For a moment, ranks of a healthy job wait like this, too.",
    "no_stacks": f" {_ONE_MOMENT} Only stacks show where the ranks are: `hangwatch dump`, or py-spy.",
    "asynchronous": (
        f" An open operation does not prove that its rank waits in it: only stacks show that. {_ONE_MOMENT}"
    ),
}
"""The end of a verdict by flight recorders that torch dumped, by `Finding.caveat`."""


def find_row(finding: Finding) -> Row:
    """Return the row of a finding. Ranks that sequence numbers name need no check that would decide."""
    row = SENTENCES[finding.sentence or finding.kind]
    if finding.is_named or finding.by_numbers or finding.rule is not None or not finding.suspects:
        return row._replace(settle="") if finding.is_named and finding.by_numbers else row
    return row._replace(settle=_ITS_GPU if finding.odd_gpu is not None else _find_blocking_call)
