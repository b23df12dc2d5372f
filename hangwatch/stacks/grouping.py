"""Groups of ranks that are in the same place. Pure."""

import itertools
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from msgspec import structs

from hangwatch import config
from hangwatch.collectives import rank_records
from hangwatch.formats import process_title
from hangwatch.model import (
    BLOCKED_STATES,
    Capture,
    Fault,
    Group,
    Grouping,
    KernelFacts,
    Member,
    Motion,
    ProcessDump,
    RankDump,
    RankId,
    RecorderFacts,
    Signature,
    Stack,
    StackFacts,
    Thread,
    Value,
    WorkerDump,
    list_by_key,
)
from hangwatch.stacks import (
    activity,
    activity_table,
    completed_collectives,
    kernel_facts,
    progress,
    side_threads,
    sleeps,
)
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.place_cache import PlaceCache
from hangwatch.stacks.process_activity import ProcessActivity
from hangwatch.stacks.rates import exceeds, measure_process
from hangwatch.stacks.user_code import user_frames

_WORKER_LOOPS = (
    "torch/utils/data/_utils/worker.py",
    "concurrent/futures/process.py",
    "multiprocessing/pool.py",
    "multiprocess/pool.py",
)
_PROCESSES = ("multiprocessing/process.py", "multiprocess/process.py")
_SHOWN = 16
_Identity = tuple[str | None, int | None, int | None, int | None]


def group_ranks(
    capture: Capture | Iterable[RankDump],
    table: activity.Table,
    settings: config.Capture,
    world_size: int | None = None,
) -> Grouping:
    """Group the ranks of a capture that are in the same place. The last round with a stack decides.

    `world_size` is the number of ranks of the job; None to use that of the capture. Ranks that could not be dumped are
    grouped by the reason of their fault. Ranks with an ended process form one group, and the ranks that died first
    another.
    """
    notes: tuple[str, ...] = ()
    if isinstance(capture, Capture):
        notes, world_size = capture.notes, capture.world_size if world_size is None else world_size
        ranks: Iterable[RankDump] = capture.ranks
    else:
        ranks = capture
    ranks = sorted(ranks, key=lambda rank: rank.id.sort_key())
    mount_holds_job = any(
        rank.waits_for_mount or any(worker.waits_for_mount for worker in rank.workers) for rank in ranks
    )
    memory = PlaceCache(table)
    is_whole = world_size is None or world_size <= len(ranks)
    measured = [_measure_rank(rank, memory, settings, is_whole, mount_holds_job) for rank in ranks]
    in_torch = {
        process_activity.key
        for rank in measured
        if rank.measured.waits.waits_in_torch
        and (process_activity := next(filter(None, reversed(rank.activities)), None)) is not None
    }
    states = [(rank, _find_last_state(rank, in_torch)) for rank in measured]
    groups = (
        _make_group(key, tuple(_make_member(rank, state, memory) for rank, state in alike), *alike[0], table)
        for key, alike in list_by_key((state.key, (rank, state)) for rank, state in states).items()
    )
    return merge_groups(groups, world_size, notes)


def merge_groups(groups: Iterable[Group], world_size: int | None, notes: Iterable[str]) -> Grouping:
    """Merge groups with equal keys, for example from several nodes. Return the merged groups, the largest first.

    The lowest rank of a group represents it. If a rank is in two groups, it stays only in the group with the smaller
    key. So the order of `groups` does not matter.
    """
    by_key = list_by_key((group.key, group) for group in groups)
    taken: set[_Identity] = set()
    merged = []
    for key in sorted(by_key):
        parts = sorted(by_key[key], key=lambda part: part.members[0].id.sort_key())
        fresh = []
        for member in (member for part in parts for member in part.members):
            identity = _make_identity(member.id)
            if identity not in taken:
                taken.add(identity)
                fresh.append(member)
        if fresh:
            fresh.sort(key=lambda member: member.id.sort_key())
            merged.append(structs.replace(parts[0], members=tuple(fresh)))
    merged.sort(key=lambda group: (-group.size, group.members[0].id.sort_key(), group.key))
    grouping = Grouping(groups=tuple(merged), world_size=world_size, notes=tuple(sorted(set(notes))))
    return completed_collectives.with_motion_of_job(grouping)


class _Rank(NamedTuple):
    """A rank of a capture: its place in each round, the facts of its flight recorders, and its measurements.

    `works_beside`: a thread works for which other ranks may wait, while the main thread waits.
    """

    dump: RankDump
    activities: Sequence[ProcessActivity | None]
    recorder: RecorderFacts
    measured: progress.Measured
    works_beside: bool


class _LastState(Value, frozen=True):
    """The last state of a rank: the place of its process and the dump that shows it, or the fault, or `gone`."""

    key: str
    process_activity: ProcessActivity | None = None
    dump: ProcessDump | None = None
    fault: Fault | None = None
    gone: bool = False


def _make_identity(rank: RankId) -> _Identity:
    """Return a key that is equal for all dumps of the same rank.

    It consists of the node and the global rank. Without a global rank it has the local rank, else the pid.
    """
    if rank.rank is not None:
        return rank.node, rank.rank, None, None
    if rank.local_rank is not None:
        return rank.node, None, rank.local_rank, None
    return rank.node, None, None, rank.pid


def _measure_rank(
    rank: RankDump, memory: PlaceCache, settings: config.Capture, is_whole: bool, mount_holds_job: bool
) -> _Rank:
    recorder = _merge_recorders(rank)
    operations = [each for library in recorder.libraries for group in library.groups for each in group.operations]
    activities = [memory.classify(dump) for dump in rank.rounds]
    measured = progress.measure(
        rank, activities, settings, operations=operations, is_whole=is_whole, mount_holds_job=mount_holds_job
    )
    works_beside = side_threads.is_group_thread_busy(rank.rounds, recorder, memory.table) and exceeds(
        measure_process(rank.rounds).io_bytes, settings.motion_io_bytes_per_second
    )
    return _Rank(rank, activities, recorder, measured, works_beside)


def _find_last_state(rank: _Rank, in_torch: Set[str]) -> _LastState:
    rounds, died = rank.dump.rounds, rank.dump.died
    last = rounds[-1] if rounds else None
    if rank.measured.signature is Signature.GONE:
        return _LastState(key="gone-first" if died is not None and died.is_first else "gone", dump=last, gone=True)
    for dump, process_activity in zip(reversed(rounds), reversed(rank.activities), strict=True):
        if process_activity is not None:
            corrected = _correct_by_measurement(process_activity, rank.measured, rank.dump, in_torch)
            return _LastState(key=corrected.key, process_activity=corrected, dump=dump)
    fault = (last.fault if last else None) or Fault(subject="rank", reason="NoStack", detail="no thread in the dump")
    return _LastState(key=f"undumpable:{fault.reason}:{fault.about}", dump=last, fault=fault)


def _correct_by_measurement(
    process_activity: ProcessActivity, measured: progress.Measured, rank: RankDump, in_torch: Set[str]
) -> ProcessActivity:
    """Return the place of a rank, corrected by its measurements. The names of its functions do not matter.

    * A main thread that waits for a child in an event loop, or through another thread, waits for that child.
    * A rank waits for its GPU, a lock (of a file or in shared memory) or clients if measurements show that.
    * A rank with an idle GPU does not wait for it in code that only its names connect with a GPU.
    * A rank in a call about a file, pipe or child waits for that object, even in code that usually waits for a GPU.
    * A rank asleep in torch's compiled code waits for its GPU or for other ranks. No Python frame shows such a wait.
      Without a device it waits for other ranks.
    * A rank without a device does not wait for a GPU if it uses the CPU, or waits for a connection.
    * A rank that receives from the store waits for the rank that must set the key.

    A rank in the same place without that measurement stays in another group: the corrected ranks may wait for it.
    Exception: a rank that was not measured, or was awake in one round, joins the corrected ranks if its place is in
    `in_torch`.
    """
    waits, place = measured.waits, process_activity
    waits_for_job = place.waits_for in ("ranks", "gpu")

    def corrected(suffix: str, waits_for: str, **doing: Any) -> ProcessActivity:
        return place._replace(key=f"{place.key}-{suffix}", waits_for=waits_for, doing=place.doing._replace(**doing))

    may_await_child = bool(place.awaited) or place.doing.row.idles
    if may_await_child and kernel_facts.awaits_child(rank.rounds):
        return corrected("child", "nothing", activity=activity_table.AWAITS_CHILD, waits=False)
    if waits.file_lock is not None and not waits_for_job:
        return corrected("lock", "lock")
    if waits.shares_lock and not waits_for_job:
        return corrected("shared-lock", "lock")
    if waits.has_device is False and waits.waits_in_torch and place.waits_for in ("unknown", "lock", "gpu"):
        return corrected("torch", "ranks")
    works = measured.signature is Signature.SPINS or waits.object == "socket"
    if waits.has_device is False and works and place.waits_for == "gpu":
        return corrected("no-gpu", "unknown")
    if rank.id.pid is not None and waits.server == rank.id.pid and place.waits_for in ("unknown", "thread"):
        return corrected("serves", "ranks", activity=activity_table.SERVING, waits=True)
    if measured.signature is Signature.BEHIND_GPU and not waits_for_job:
        return corrected("gpu", "gpu")
    if place.waits_for == "gpu" and rank.gpu.is_idle and place.doing.row.by_name_alone:
        return corrected("idle-gpu", "unknown")
    if place.waits_for == "gpu" and kernel_facts.awaits_object(waits) and waits.object != "socket":
        return corrected("call", "lock")
    if waits.awaits_store == "main" and place.waits_for == "unknown":
        return corrected("store", "ranks", operation="the store", waits=True)
    may_be_in_torch = place.key in in_torch and waits.waits_in_torch is not False
    return corrected("torch", "gpu") if may_be_in_torch and place.waits_for in ("unknown", "lock") else place


def _make_member(rank: _Rank, answer: _LastState, memory: PlaceCache) -> Member:
    dump, activities, recorder, measured, works_beside = rank
    differ = any(place is not None and len(place.awaited) > 1 for place in activities)
    is_unclear = differ and measured.signature is Signature.BLOCKED
    signature = Signature.UNKNOWN if is_unclear else measured.signature
    motion = _find_motion(rank, signature, memory)
    waits = measured.waits
    deciding = answer.process_activity.find_telling(answer.dump) if answer.process_activity and answer.dump else None
    frames_of_user, caller = memory.user_code(deciding) if deciding else ((), None)
    others = answer.process_activity.others if answer.process_activity else ()
    main = stack_frames.main_thread(answer.dump.threads) if answer.dump else None
    call = dump.rounds[-1].main.call if dump.rounds else None
    is_at_thread = answer.process_activity is not None and answer.process_activity.waits_for == "thread"
    earlier = (place for place in activities[:-1] if place is not None)
    waits_before = (place.doing.row for place in earlier if place.waits_for == "ranks")
    asks_store = waits.awaits_store == "main" or is_at_thread
    return Member(
        id=dump.id,
        motion=Motion.UNKNOWN if works_beside and motion is Motion.FROZEN else motion,
        signature=signature,
        stack=memory.share(
            StackFacts(
                user_frames=frames_of_user,
                caller=caller,
                waited_before=any(not (row.leaves_the_job or row.idles) for row in waits_before),
                owns_gil=main.owns_gil if main else None,
                stay=measured.stay,
                task=side_threads.find_stuck_task(dump.rounds, memory.table),
                sleep=sleeps.find_sleep(dump, activities),
                is_alone=deciding is not None and deciding is main and not others,
            )
        ),
        rounds=len(dump.rounds),
        kernel=memory.share(
            KernelFacts(
                state=_merge_states(dump.rounds),
                wchan=answer.dump.main.wchan if answer.dump else None,
                silent_mount=dump.silent_mount,
                waits_for_mount=dump.waits_for_mount,
                receives=call is not None and call.kind == "receives",
                rests=kernel_facts.find_rest(dump.rounds),
                is_held_outside=kernel_facts.is_held_outside(dump, waits),
                call=dump.kernel_call,
                worker_call=dump.worker_call,
                lines=dump.kernel_lines,
            )
        ),
        usage=measured.usage,
        waits=waits if asks_store else structs.replace(waits, awaits_store=None),
        gpu=memory.share(dump.gpu),
        waiting=dump.waiting,
        recorder=recorder if recorder.libraries else memory.share(recorder),
        died=dump.died,
        most_peers=dump.most_peers,
    )


def _merge_recorders(rank: RankDump) -> RecorderFacts:
    read, faults = [dump.recorders for dump in rank.rounds], [dump.recorder_faults for dump in rank.rounds]
    if not any(read):
        return RecorderFacts(faults=rank_records.faults(faults, ()))
    threads = next((dump.threads for dump in reversed(rank.rounds) if dump.threads), ())
    main = stack_frames.main_thread(threads)
    main_thread_id = main.pthread_id if main else None
    deciding = [thread for thread in threads if thread is main or thread.trains]
    names = {each.pthread_id: side_threads.name_thread(each) for each in threads if each.pthread_id}
    names |= dict.fromkeys((each.pthread_id for each in deciding if each.pthread_id), "")
    libraries = rank_records.merge_rounds(read, names if main_thread_id in names else {})
    return RecorderFacts(
        libraries=libraries,
        faults=rank_records.faults(faults, libraries),
        progress=completed_collectives.measure(read, main_thread_id),
    )


def _find_motion(rank: _Rank, signature: Signature, memory: PlaceCache) -> Motion:
    """Return the motion of a rank: frozen if its flight recorder shows that it stands still, else by its signature.

    Its measured signature decides, too, if the lines of the user's code changed, if a round has no flight recorder, or
    if the rank waits for other ranks and carries bytes of its collective: a slow one is open in many rounds.
    """
    rounds, completed = rank.dump.rounds, rank.recorder.progress
    if len(rounds) < 2 or rank.measured.carries_collective or not all(dump.recorders for dump in rounds):
        return signature.motion
    placed = ((dump, place) for dump, place in zip(rounds, rank.activities, strict=True) if place is not None)
    telling = filter(None, (place.find_telling(dump) for dump, place in placed))
    if len({memory.user_code(thread)[0] for thread in telling}) > 1:
        return signature.motion
    return Motion.FROZEN if completed is not None and completed.is_standing else signature.motion


def _merge_states(rounds: Sequence[ProcessDump]) -> str | None:
    """Return the state over all rounds. If it changed, the last other than `D`, because short disk waits are normal."""
    if len(rounds) == 1:
        return rounds[0].state
    states = [dump.state for dump in rounds if dump.state is not None]
    passing = (state for state in reversed(states) if state not in BLOCKED_STATES)
    return next(passing, states[-1] if states else None)


def _make_group(key: str, members: tuple[Member, ...], rank: _Rank, answer: _LastState, table: activity.Table) -> Group:
    workers = _merge_workers(rank.dump, table)
    if answer.process_activity is None or answer.dump is None:
        return Group(
            key=key, activity="unknown", members=members, workers=workers, fault=answer.fault, gone=answer.gone
        )
    process_activity, threads = answer.process_activity, answer.dump.threads
    telling = process_activity.find_telling(answer.dump)
    return Group(
        key=key,
        activity=process_activity.doing.activity,
        operation=process_activity.doing.operation,
        waits_for=process_activity.waits_for,
        phase=process_activity.phase,
        members=members,
        frames=telling.frames if telling else (),
        threads=tuple(side_threads.make_stack(threads[index], table) for index in process_activity.others[:_SHOWN]),
        awaited=tuple(
            structs.replace(side_threads.make_stack(thread, table), user_frame=next(iter(user_frames(thread)), None))
            for thread in map(threads.__getitem__, process_activity.awaited[:_SHOWN])
        ),
        workers=workers,
    )


def _merge_workers(rank: RankDump, table: activity.Table) -> tuple[Stack, ...]:
    """Return the stacks of a rank's workers, equal ones as one. Awaited workers come first, then the most common."""
    awaited = {pid for call in kernel_facts.list_calls(rank.rounds) for pid in call.workers}
    counted: dict[tuple[bool, tuple[stack_frames.Place, ...]], list[tuple[WorkerDump, Thread]]] = {}
    for worker in rank.workers:
        threads = worker.rounds[-1].threads if worker.rounds else ()
        main = stack_frames.main_thread(threads) or next(iter(threads), None)
        if main and main.frames:
            key = worker.pid not in awaited, stack_frames.key_places(main.frames)
            counted.setdefault(key, []).append((worker, main))
    ordered = sorted(counted.items(), key=lambda item: (item[0][0], -len(item[1]), item[0]))
    return tuple(
        _make_worker_stack(len(alike), *alike[0], table, is_awaited=not key[0]) for key, alike in ordered[:_SHOWN]
    )


def _make_worker_stack(
    count: int, worker: WorkerDump, thread: Thread, table: activity.Table, *, is_awaited: bool
) -> Stack:
    """Return the stack of one worker, with the number of workers that have the same stack.

    Frames of the user's code that the worker inherited from its parent do not count as its place in that code.
    """
    title, loops = process_title.read(worker.comm), (*_WORKER_LOOPS, *(_PROCESSES if is_awaited else ()))
    task = list(itertools.takewhile(lambda frame: not frame.file.endswith(loops), thread.frames))
    within = task[thread.installed_frames or 0 :] if len(task) < len(thread.frames) else []
    return Stack(
        name=f"{count} x {title.family if title and title.numbers and count > 1 else worker.comm}",
        frames=thread.frames,
        activity=table.classify_thread(thread).activity,
        pid=worker.pid,
        state=_merge_states(worker.rounds),
        user_frame=next(iter(within), None),
        is_awaited=is_awaited,
    )
