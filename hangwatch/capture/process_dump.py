"""Dump one process in one round: its state in the kernel, its stacks, and its flight recorders."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.capture import stack_limits
from hangwatch.capture.connections import JobConnections
from hangwatch.capture.request import CaptureRequest
from hangwatch.collectives import rank_records
from hangwatch.formats import pyspy_json
from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    STOPPED_STATES,
    AwaitedThread,
    Fault,
    FileLock,
    MainThread,
    ProcessDump,
    ProcessId,
    SystemCall,
    Thread,
)
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.process import (
    blocked_call,
    call_timeout,
    control_groups,
    credentials,
    dump_obstacles,
    file_locks,
    main_thread,
    native_stack,
    pyspy,
    pystack,
)
from hangwatch.probes.torch_recorder import threads as recorder_threads
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import find_process_activity

_DESCRIPTORS_KEPT = 16
_SECONDS_PER_THREAD = 0.005  # py-spy needs 1 to 3 ms per thread on a busy node
_MOST_FAULTS = 4  # of the recorders of one rank
_FAULT_CHARACTERS = 256


class ProcessDumper(NamedTuple):
    """The function that dumps one process, with the settings and the state that all dumps of a capture share.

    `reader_uid` is the user that may read the incident; None or 0: only root. `pyspy_path` is None if there is no
    py-spy. `unreadable` collects the processes that neither py-spy nor pystack can read. `too_large` has the faults of
    processes for which py-spy needed too much memory: it is not tried again in this capture. `awaited` are the threads
    for which the main threads were seen waiting last.
    """

    request: CaptureRequest
    pyspy_path: Path | None
    connections: JobConnections
    share: str
    reader_uid: int | None
    ranks: frozenset[ProcessId]
    unreadable: set[ProcessId]
    too_large: dict[ProcessId, Fault]
    awaited: dict[ProcessId, int]
    stack_budget: stack_limits.StackBudget

    def take(self, target: ProcessId, end: float) -> ProcessDump:
        """Dump one process in one round; `end` is the round's deadline on CLOCK_MONOTONIC."""
        proc_root = self.request.paths.proc_root
        counters = procfs.read_counters(target.pid, proc_root)
        now = time.monotonic()
        if counters.id != target or (counters.state or "X") in ENDED_STATES:
            gone = Fault(
                subject=f"pid {target.pid}", reason="ProcessGone", detail="the process has ended", about="target"
            )
            return ProcessDump(taken_monotonic_seconds=now, fault=gone)
        if (fault := self._anothers(target)) is not None:
            return ProcessDump(taken_monotonic_seconds=now, fault=fault, state=counters.state)
        call = call_timeout.add_end(target.pid, main_thread.read_call(target.pid, proc_root), proc_root)
        main = MainThread(wchan=counters.wchan, call=call)
        dump = ProcessDump.copy_from(counters, taken_monotonic_seconds=now, main=main)
        recorders, recorder_faults = self._recorders(target, end - time.monotonic())
        with self._slot(end - now):
            before = main_thread.read_counters(target.pid, proc_root, self.awaited.get(target))
            threads, answer = self._stacks(target, counters.state, end - time.monotonic())
            trainers = {record.thread_id for each in recorders for record in each.records if record.thread == "trainer"}
            threads = tuple(replace(thread, trains=thread.pthread_id in trainers) for thread in threads)
            dump = self._with_awaited_thread(target, dump, threads)
            after = main_thread.read_counters(target.pid, proc_root, self.awaited.get(target))
        dump = self.connections.add_connections(target.pid, dump, threads)
        if (fault := self._anothers(target)) is not None:  # checked again: execve keeps the pid
            return ProcessDump(taken_monotonic_seconds=now, fault=fault, state=counters.state)
        if self.request.observe_dump is not None:
            self.request.observe_dump(answer.duration_seconds, answer.fault)
        if (call := dump.main.call) is not None:
            call = replace(call, descriptors=call.descriptors[:_DESCRIPTORS_KEPT])
        waits_in_torch = has_device = None
        if target in self.ranks:
            waits_in_torch, has_device = native_stack.read(target.pid, proc_root, self.awaited.get(target))
        return replace(
            dump,
            threads=threads,
            fault=answer.fault,
            state_after=answer.state_after,
            called=self._called(target, answer.fault),
            duration_seconds=answer.duration_seconds,
            main=replace(dump.main, call=call, before=before, after=after),
            waits=replace(
                dump.waits,
                file_lock=dump.waits.file_lock or self._find_polled_lock(target, dump, threads),
                frozen_cgroup=control_groups.frozen_cgroup(
                    target.pid, counters.state, counters.wchan, proc_root, self.request.paths.sys_root
                ),
                tracer=_tracer(target.pid, proc_root) if counters.state in STOPPED_STATES else None,
                waits_in_torch=waits_in_torch,
                has_device=has_device,
            ),
            recorders=recorders,
            recorder_faults=recorder_faults,
        )

    def _find_polled_lock(self, target: ProcessId, dump: ProcessDump, threads: tuple[Thread, ...]) -> FileLock | None:
        """Return the lock that the main thread tries to take again and again.

        It polls a lock file, or sleeps while another rank holds a lock on a file that it has open.
        """
        main, table = stack_frames.main_thread(threads), self.request.activities
        if main is None or table is None or target not in self.ranks:
            return None
        is_at_lock_file = table.classify_thread(main).row.held_elsewhere
        if not is_at_lock_file and (dump.main.call is None or dump.main.call.kind != "sleeps"):
            return None
        of_ranks = None if is_at_lock_file else {rank.pid for rank in self.ranks}
        return file_locks.find_polled_lock(target.pid, self.request.paths.proc_root, of_ranks)

    def _with_awaited_thread(self, target: ProcessId, dump: ProcessDump, threads: tuple[Thread, ...]) -> ProcessDump:
        """Return the dump with the call and the state of the thread, or the child, that the main thread waits for."""
        proc_root, table = self.request.paths.proc_root, self.request.activities
        awaited_places = find_process_activity(threads, table).awaited if table and target in self.ranks else ()
        stack = threads[awaited_places[0]] if len(awaited_places) == 1 else None
        inner = int(stack.thread_id) if stack is not None and stack.thread_id.isdecimal() else None
        thread = None if inner is None else main_thread.find_thread(target.pid, inner, proc_root)
        if stack is None or thread is None:
            self.awaited.pop(target, None)
            call = blocked_call.follow_child(target.pid, dump.main.call, proc_root)
            return replace(dump, main=replace(dump.main, call=call))
        self.awaited[target] = thread
        awaited = AwaitedThread(id=thread, name=words.printable(stack.name or ""))
        state, wchan = main_thread.read_state(target.pid, thread, proc_root)
        call = main_thread.read_call(target.pid, proc_root, thread)
        if call is not None and (call.kind == "sleeps" or stack.trains):
            call = call_timeout.add_end(target.pid, call, proc_root, thread)
        if not stack.trains:  # whatever the main thread does, it may not wait for the thread that trains
            call = _with_earlier_end(call, dump.main.call)
        return replace(
            dump,
            state=state if state in BLOCKED_STATES else dump.state,
            main=MainThread(awaited_thread=awaited, wchan=wchan, call=call),
        )

    def _recorders(self, target: ProcessId, left_seconds: float) -> tuple[tuple[RankRecords, ...], tuple[Fault, ...]]:
        """Return the flight recorders of a rank, and the faults of others; none for a worker or after the round."""
        if target not in self.ranks or self.request.stop.is_set() or left_seconds <= 0:
            return (), ()
        read = torch_recorder.SHARED.read(target, self.share, rank_records.NEWEST_KEPT)
        faults = (one for one in read if isinstance(one, Fault))
        kept = [rank_records.drop_unneeded(one) for one in read if not isinstance(one, Fault)]
        return (
            recorder_threads.with_threads(kept, target, self.request.paths.proc_root),
            tuple(replace(one, detail=words.elided(one.detail, _FAULT_CHARACTERS)) for one in faults)[:_MOST_FAULTS],
        )

    def _anothers(self, target: ProcessId) -> Fault | None:
        """Return a fault if the process runs as another user than the job's owner; else None.

        The owner can read incidents, and must not see the stacks of other users.
        """
        proc_root = self.request.paths.proc_root
        if not self.reader_uid or credentials.read_only_user(target, proc_root) == self.reader_uid:
            return None
        if not procfs.is_alive(target, proc_root):
            return None
        detail = "it runs as another user than its job, whose owner reads the incident"
        remedy = f"as root: py-spy dump --pid {target.pid}"
        return Fault(subject=f"pid {target.pid}", reason="AnotherUsers", detail=detail, remedy=remedy)

    @contextmanager
    def _slot(self, left_seconds: float) -> Iterator[None]:
        """Hold one dump slot within the `with` block; none if the round ends first, which `_stacks` then reports."""
        has_one = self.request.slots is not None and self.request.slots.acquire(timeout=max(0.0, left_seconds))
        try:
            yield
        finally:
            if has_one and self.request.slots is not None:
                self.request.slots.release()

    def _called(self, target: ProcessId, fault: Fault | None) -> str | None:
        if fault is None or fault.reason not in pyspy.STUCK_REASONS:
            return None
        mount = filesystems.mount_of_system_call(self.request.paths.proc_root, target.pid)
        return mount.device if mount else None

    def _stacks(
        self, target: ProcessId, state: str | None, left_seconds: float
    ) -> tuple[tuple[Thread, ...], pyspy.PyspyAnswer]:
        subject = f"pid {target.pid}"
        fault = self.too_large.get(target)
        if self.request.stop.is_set():
            fault = Fault(subject=subject, reason="Interrupted", detail="hangwatch was asked to stop")
        elif left_seconds <= 0:
            fault = Fault(subject=subject, reason="RoundDeadline", detail="the round was over before its turn came")
        if fault is not None:
            return (), pyspy.PyspyAnswer(json=None, fault=fault, duration_seconds=0.0, state_after=state)
        answer = pyspy.dump(
            target.pid,
            deadline_seconds=self._deadline_seconds(target, left_seconds),
            mode=self.request.mode,
            pyspy_path=self.pyspy_path,
            stop=self.request.stop,
            proc_root=self.request.paths.proc_root,
            share=self.share,
        )
        if answer.fault is not None and answer.fault.reason == "TooLarge":
            self.too_large[target] = answer.fault
        answer = self._second(target, answer, left_seconds - answer.duration_seconds)
        if answer.json is None:
            return (), answer
        try:
            inner = procfs.read_inner_pid(target.pid, self.request.paths.proc_root)
            stacks = pyspy_json.parse_json(answer.json, inner, sees_states=inner == target.pid)
            room = self.stack_budget.rank_bytes if target in self.ranks else self.stack_budget.worker_bytes
            return stack_limits.fit_threads(stacks, room), answer
        except pyspy_json.DumpError as error:
            return (), replace(answer, json=None, fault=Fault(subject=subject, reason="BadDump", detail=str(error)))

    def _deadline_seconds(self, target: ProcessId, left_seconds: float) -> float:
        """Return the deadline of one dump in seconds. It grows with the threads, up to the end of the round."""
        threads = procfs.read_thread_count(target.pid, self.request.paths.proc_root)
        return min(self.request.settings.dump_deadline_seconds + threads * _SECONDS_PER_THREAD, left_seconds)

    def _second(self, target: ProcessId, answer: pyspy.PyspyAnswer, left_seconds: float) -> pyspy.PyspyAnswer:
        """Return py-spy's answer, or the stacks from pystack if py-spy failed or shows another interpreter.

        If pystack fails too, do not try it again. A known cause of the failure replaces the fault.
        """
        fault = answer.fault or self._other_interpreter(target, answer)
        if fault is None or fault.reason not in pystack.REASONS:
            return answer
        proc_root, may_ask = self.request.paths.proc_root, self.request.settings.pystack
        second = replace(answer, fault=fault)
        if may_ask and target not in self.unreadable and left_seconds > 0:
            second = pystack.dump(
                target.pid,
                second,
                deadline_seconds=self._deadline_seconds(target, left_seconds),
                stop=self.request.stop,
                proc_root=proc_root,
                share=self.share,
            )
            if second.fault is not None and second.fault.reason in pystack.REASONS:
                self.unreadable.add(target)
        if second.fault is None or answer.fault is None:
            return second if second.fault is None else answer
        has_pystack = may_ask and pystack.is_installed()
        obstacle = dump_obstacles.find_obstacle(target.pid, proc_root, has_pystack=has_pystack)
        if obstacle is None or second.fault.reason not in pystack.REASONS:
            return second
        return replace(second, fault=replace(obstacle, detail=f"{obstacle.detail}: {second.fault.detail}"))

    def _other_interpreter(self, target: ProcessId, answer: pyspy.PyspyAnswer) -> Fault | None:
        """Return a fault if py-spy may have read another interpreter than the main one of a process with threads."""
        if answer.json is None or pyspy_json.names_main_thread(answer.json):
            return None
        if procfs.read_thread_count(target.pid, self.request.paths.proc_root) < 2 and b'"line"' in answer.json:
            return None
        return Fault(subject=f"pid {target.pid}", reason="NoMainThread", detail="py-spy shows no main thread")


def _with_earlier_end(call: SystemCall | None, main: SystemCall | None) -> SystemCall | None:
    """Return the call of an awaited thread. If the main thread stops waiting before it ends: with that earlier end."""
    if call is None or main is None or main.left_seconds is None:
        return call
    if call.left_seconds is not None and call.left_seconds <= main.left_seconds:
        return call
    return replace(call, left_seconds=main.left_seconds, until_unix_seconds=main.until_unix_seconds)


def _tracer(pid: int, proc_root: Path) -> str | None:
    """Return name and pid of the process that traces this one ("gdb, pid 4711"); None if none does."""
    tracer = procfs.read_tracer(pid, proc_root)
    if tracer is None:
        return None
    return f"{procfs.read_comm(tracer, proc_root) or 'a tracer'}, pid {tracer}"
