"""Diagnosis of one job: capture, grouping and verdict."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.capture import kernel_log
from hangwatch.capture.request import CaptureRequest, NodePaths
from hangwatch.capture.rounds import capture
from hangwatch.model import (
    Capture,
    Job,
    KernelCall,
    Motion,
    OutputEnd,
    ProcessDetails,
    ProcessDump,
    ProcessId,
    RankId,
    WorkerCall,
)
from hangwatch.probes.base import procfs
from hangwatch.probes.node import host, kmsg
from hangwatch.probes.process import blocked_call, credentials, locked_memory, process_details, rank_output
from hangwatch.probes.process import environment as environments
from hangwatch.stacks.activity import Table
from hangwatch.tables import launchers
from hangwatch.verdict import environment_diff, kinds
from hangwatch.verdict.diagnosis import Diagnosis, diagnose
from hangwatch.verdict.wording import clauses
from hangwatch.verdict.wording.evidence import MOST_SHOWN

_CALLS_CPU_SECONDS = 2.0
_OUTPUT_DEADLINE_SECONDS = 3.0
_ENVIRONMENT_SECONDS = 2.0


def diagnose_job(job: Job, request: CaptureRequest, activities: Table) -> Diagnosis:
    """Take the stacks of every rank of a job on this node (see `capture`), group the ranks and judge the groups.

    Facts that are slow to read, such as the target of a system call, are read only for ranks that the first verdict
    names or lists under "check first". Then the groups are judged again.
    """
    settings, stop, proc_root = request.settings, request.stop, request.paths.proc_root
    taken = capture(job, replace(request, activities=activities))
    if settings.kernel_log:
        taken = _with_kernel_lines(taken, job, request.paths)
    sweep = request.gpus.read_sweep() if request.gpus.read_sweep else None
    facts = host.read_facts(sweep.driver_version if sweep else None)
    owner_ranks = {} if stop.is_set() else _own_ranks(taken, job, proc_root)
    ends, notes = _outputs(owner_ranks, job, stop, proc_root) if settings.logs else ({}, ())
    compared = environment_diff.compare(_environs(owner_ranks, job, proc_root)) if settings.environment else None
    taken = replace(taken, notes=(*taken.notes, *notes), environment=compared)
    inner_pids = {rank: procfs.read_inner_pid(rank.pid, proc_root) for rank in ends if rank.pid is not None}
    if ends:
        from hangwatch.logs import live_output  # not at the start: only a diagnosis of ranks with logs needs it
    logs = live_output.read_logs(ends, inner_pids) if ends else ()

    def judged(taken: Capture) -> Diagnosis:
        ranks_here = job.ranks_here or None
        return diagnose(
            taken, settings, activities, unix_now=time.time(), host_facts=facts, ranks_here=ranks_here, logs=logs
        )

    look = judged(taken)
    pointed = [] if stop.is_set() else _pointed_at(look)
    if pids := pointed or ([] if stop.is_set() else _representatives(look)):
        taken = _with_calls(taken, look, pids, job, proc_root)
        details = _details(owner_ranks, pointed) if settings.details else {}
        ranks = tuple(
            replace(
                rank,
                last_lines=live_output.last_lines(ends[rank.id]) if rank.id in ends else (),
                details=details.get(rank.id),
            )
            if rank.id.pid in pointed
            else rank
            for rank in taken.ranks
        )
        look = judged(replace(taken, ranks=ranks))
    return replace(look, uid=job.uid)


def _with_calls(taken: Capture, look: Diagnosis, pids: Collection[int], job: Job, proc_root: Path) -> Capture:
    """Return the capture with the system calls of the ranks with these pids, and of the workers for which they wait."""
    at_work = _workers_at_work(look, pids)
    rounds = {rank.id.pid: rank.rounds for rank in taken.ranks if rank.id.pid in pids}
    for rank in taken.ranks:
        rounds |= {worker.pid: worker.rounds for worker in rank.workers if worker.pid == at_work.get(rank.id.pid)}
    calls = _kernel_calls(rounds, job, proc_root)

    def worker_call(rank_pid: int | None) -> WorkerCall | None:
        pid = at_work.get(rank_pid)
        return None if pid is None or pid not in calls else WorkerCall(pid=pid, call=calls[pid])

    ranks = (
        replace(rank, kernel_call=calls.get(rank.id.pid), worker_call=worker_call(rank.id.pid)) for rank in taken.ranks
    )
    return replace(taken, ranks=tuple(ranks))


def _with_kernel_lines(taken: Capture, job: Job, paths: NodePaths) -> Capture:
    """Return the capture with the kernel log lines about each rank; unchanged if the log cannot be read."""
    log = kmsg.SHARED.read(paths.kernel_log, kernel_log.find_begin(job))
    if not isinstance(log, kmsg.KernelEvents):
        return taken
    found = kernel_log.find_lines(job, log.lines, now=time.monotonic(), unix_now=time.time(), proc_root=paths.proc_root)
    ranks = (replace(rank, kernel_lines=found.get(rank.id.pid or 0, ())) for rank in taken.ranks)
    return replace(taken, ranks=tuple(ranks))


def _own_ranks(taken: Capture, job: Job, proc_root: Path) -> dict[RankId, tuple[ProcessId, int]]:
    """Return the ranks that run as the owner, who can read the incident, each with its process and user id."""
    ids = {process.pid: process for process in job.processes}
    found = {}
    for rank in taken.ranks:
        target = ids.get(rank.id.pid or 0)
        uid = credentials.read_only_user(target, proc_root) if target is not None else None
        if target is not None and uid is not None and (not job.uid or uid == job.uid):
            found[rank.id] = target, uid
    return found


def _environs(
    owner_ranks: Mapping[RankId, tuple[ProcessId, int]], job: Job, proc_root: Path
) -> dict[RankId, Mapping[str, str]]:
    """Return the environments at the start of the ranks. A rank that started the others set its variables later."""
    is_led = job.launcher in launchers.STARTED_BY_FIRST
    owner_ranks = {rank: facts for rank, facts in owner_ranks.items() if rank.local_rank or not is_led}
    targets = [locked_memory.Target(target, job.share or job.owner) for target, _ in owner_ranks.values()]
    answers = locked_memory.SHARED.read(
        targets, lambda target: environments.read_allowed(target.pid, proc_root), _ENVIRONMENT_SECONDS
    )
    read = ((rank, answers.get(target)) for rank, (target, _) in owner_ranks.items())
    return {rank: answer for rank, answer in read if isinstance(answer, dict) and answer}


def _outputs(
    owner_ranks: Mapping[RankId, tuple[ProcessId, int]], job: Job, stop: threading.Event, proc_root: Path
) -> tuple[dict[RankId, tuple[OutputEnd, ...]], tuple[str, ...]]:
    """Return the ends of the files of the owner to which the ranks have written, and notes on files not read."""
    if not owner_ranks:
        return {}, ()
    ends_by_process, faults = rank_output.read(
        dict(owner_ranks.values()),
        share=job.share or job.owner,
        deadline_seconds=_OUTPUT_DEADLINE_SECONDS,
        stop=stop,
        proc_root=proc_root,
    )
    ends = {rank: ends_by_process[target] for rank, (target, _) in owner_ranks.items() if target in ends_by_process}
    return ends, tuple(sorted({f"the logs of some ranks were not read: {fault.reason}" for fault in faults}))


def _details(
    owner_ranks: Mapping[RankId, tuple[ProcessId, int]], pids: Collection[int]
) -> dict[RankId, ProcessDetails]:
    """Return details of the ranks with these pids that still run as the same user."""
    targets = {rank: target for rank, (target, _) in owner_ranks.items() if target.pid in pids}
    details = process_details.read(list(targets.values()))
    return {
        rank: details[target]
        for rank, target in targets.items()
        if target in details and credentials.read_only_user(target) == owner_ranks[rank][1]
    }


def _pointed_at(look: Diagnosis) -> list[int]:
    """Return the pids of the ranks that a verdict names or lists under "check first", at most 8.

    A rank with a `stay` moves between a few lines, which may be progress or not: later captures decide. So the
    ranks of both possible verdicts are returned.
    """
    stays = [member.id for member in look.grouping.members if member.stack.stay is not None]
    verdicts = (look.verdict, look.without_motion_of(stays).verdict)
    ranks = (rank for verdict in verdicts for rank in (*verdict.named, *verdict.check_first))
    return list(dict.fromkeys(rank.pid for rank in ranks if rank.pid is not None))[:MOST_SHOWN]


def _representatives(look: Diagnosis) -> list[int]:
    """Return a rank of each group that waits for neither ranks nor GPUs, and all without a stack; [] if one moves."""
    groups = [group for group in look.grouping.groups if group.waits_for not in ("ranks", "gpu")]
    if not kinds.find(look.verdict.kind).needs_calls or any(group.motion is Motion.MOVING for group in groups):
        return []
    members = (group.members if group.fault else group.members[:1] for group in groups if not group.gone)
    return [member.id.pid for each in members for member in each if member.id.pid is not None][:MOST_SHOWN]


def _workers_at_work(look: Diagnosis, pids: Collection[int]) -> dict[int | None, int]:
    """Return {pid of a rank: pid of the worker for which it waits}, for the ranks that are alone in their group."""
    alone = [group for group in look.grouping.groups if group.size == 1 and group.members[0].id.pid in pids]
    workers = ((group.members[0].id.pid, clauses.find_busy_worker(group)) for group in alone)
    return {pid: worker.pid for pid, worker in workers if worker is not None and worker.pid is not None}


def _kernel_calls(
    rounds: Mapping[int | None, Sequence[ProcessDump]], job: Job, proc_root: Path
) -> dict[int | None, KernelCall]:
    """Return system calls by pid. A process is left out if its pid was reused, or if it runs as another user."""
    end = time.thread_time() + _CALLS_CPU_SECONDS
    ids: dict[int | None, ProcessId] = {process.pid: process for process in job.processes}
    ids |= {worker.id.pid: worker.id for rank in job.ranks for worker in rank.workers}
    pids = sorted(job.pids)
    strangers = blocked_call.Strangers(pids, proc_root, _CALLS_CPU_SECONDS / 2)
    calls: dict[int | None, KernelCall] = {}
    for target, dumps in ((ids[pid], dumps) for pid, dumps in rounds.items() if pid in ids):
        if time.thread_time() > end:
            break
        call = blocked_call.read(target.pid, dumps, pids, strangers)
        uid = credentials.read_only_user(target, proc_root)
        is_same = uid == job.uid if job.uid else procfs.is_alive(target, proc_root)
        if call is not None and is_same:
            calls[target.pid] = call
    return calls
