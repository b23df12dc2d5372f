"""The place of a process, by all its Python threads together. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hangwatch.model import ProcessDump, Thread
from hangwatch.stacks import activity, activity_table
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.user_code import library_frames, user_frames

_MOST_THREADS = 64
_THREAD_WAITS = ("threading.py", "queue.py")  # where the standard library waits for another thread, in Python


class ProcessActivity(NamedTuple):
    """The place of a process: its activity, and a key that is equal for all processes in the same place.

    `telling` is the thread that decides, `others` are those of the threads to show in addition. `awaited` are the
    threads that MainThread waits for: one for all that are at the same place, so several are at different places. All
    are indexes into the threads of the dump.
    """

    key: str
    doing: activity.StackActivity
    waits_for: str
    phase: str | None
    telling: int | None
    others: tuple[int, ...]
    awaited: tuple[int, ...] = ()

    def find_telling(self, dump: ProcessDump) -> Thread | None:
        """Return the thread of the dump that decides; None if there is none."""
        return None if self.telling is None else dump.threads[self.telling]


def find_process_activity(threads: Sequence[Thread], table: activity.Table) -> ProcessActivity:
    """Return the place of a process with these threads.

    MainThread decides. Another thread decides in three cases: MainThread waits for that thread, MainThread is in the
    backward pass (its hooks run in autograd's threads), or the dump does not show MainThread. If MainThread waits for
    threads at different places, none of them decides. The key includes the stacks of threads in a collective, but not
    those of other threads: ranks may differ in these.
    """
    main = stack_frames.main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and _python(thread))
    workers = tuple(thread for thread in others if thread.trains or not _is_service(thread))
    in_key = tuple(thread for thread in workers if table.classify_thread(thread).row.in_key)
    awaited = _find_awaited(main, workers, table) if main else ()
    telling = _choose_thread(main, workers, in_key, table)
    if telling is main and main is not None and len(awaited) == 1 and _decides(awaited[0], main, table):
        telling = awaited[0]
    elif len(awaited) > 1:
        telling = main
    frames = telling.frames if telling else ()
    doing = _doing(telling, table) if telling else table.classify(())
    if telling in awaited and doing.activity == "unknown" and main is not None:
        doing = _context(main, table) or doing
    instead = _find_replacing_threads(doing, others, table)
    shown = dict.fromkeys(stack_frames.key_places(thread.frames) for thread in in_key if thread is not telling)
    main_places = stack_frames.key_places(main.frames) if main else ()
    telling_places = stack_frames.key_places(frames) if telling is not main else ()
    if instead:
        doing = table.classify_thread(instead[0])
    other_threads = [*instead, *((main, *workers) if main else workers)]
    places = {id(thread): place for place, thread in enumerate(threads)}
    return ProcessActivity(
        key=stack_frames.digest((main_places, telling_places, tuple(sorted(shown)), doing)),
        doing=doing,
        waits_for=doing.row.waits_for,
        phase=table.phase(frames) or (table.phase(main.frames) if main else None),
        telling=places[id(telling)] if telling else None,
        others=tuple(places[id(thread)] for thread in other_threads if thread is not telling and _python(thread)),
        awaited=tuple(places[id(thread)] for thread in awaited),
    )


def _doing(thread: Thread, table: activity.Table) -> activity.StackActivity:
    """Return the activity of a thread; if it waits for a thread, queue or child, that of the program around it."""
    doing = table.classify_thread(thread)
    around = _context(thread, table) if doing.row.waits_for == "thread" else None
    return around or doing


def _context(thread: Thread, table: activity.Table) -> activity.StackActivity | None:
    """Return the part of the program around a stack, if a rank that is in it waits for nothing."""
    around = table.context(thread.frames)
    return around if around is not None and around.row.waits_for == "nothing" else None


def _find_awaited(main: Thread, workers: Sequence[Thread], table: activity.Table) -> tuple[Thread, ...]:
    """Return the threads that MainThread waits for, one for each place; none if they are not known.

    It is the thread that trains, whatever MainThread does. Else the library calls of MainThread tell which: a row of
    `awaits_threads`, else a wait for a thread, a queue or a lock, behind which are threads in the program's own code.
    Of these, a thread that itself waits for another one does not count. If a thread is in a collective, that one
    decides.
    """
    trainers = tuple(
        thread for thread in workers if thread.trains and table.classify_thread(thread).row.waits_for != "thread"
    )
    calls = stack_frames.python_frames(library_frames(main))
    doing = table.classify_thread(main).row
    waits = doing.waits_for in ("ranks", "gpu") and doing.work_is_in != "threads"
    if trainers or not calls or waits or not activity_table.is_marked("awaits", *calls[0].place):
        return trainers
    looked_at = workers[:_MOST_THREADS]
    rows = [row for row in activity_table.awaits_threads() if row.caller.match_any(calls)]
    in_program = {id(thread) for thread in looked_at if user_frames(thread)}
    chosen: Sequence[Thread] = ()
    if rows:
        awaited = ([thread for thread in looked_at if row.awaits(thread)] for row in rows)
        chosen = next(filter(None, awaited), ())
        chosen = [thread for thread in chosen if id(thread) in in_program] or chosen
    elif doing.waits_for in ("thread", "lock") and stack_frames.short_path(calls[0].file) in _THREAD_WAITS:
        chosen = [thread for thread in looked_at if id(thread) in in_program]
    if chosen and any(table.classify_thread(thread).row.in_key for thread in workers):
        return ()
    by_place: dict[object, Thread] = {}
    for thread in chosen:
        if id(thread) not in in_program or table.classify_thread(thread).row.waits_for != "thread":
            by_place.setdefault(stack_frames.key_places(thread.frames), thread)
    return tuple(by_place.values())


def awaits_thread(threads: Sequence[Thread]) -> bool:
    """True if MainThread waits for a thread, a queue, an event or an event loop; a bare lock does not count."""
    main = stack_frames.main_thread(threads)
    calls = stack_frames.python_frames(library_frames(main) if main is not None else ())
    return bool(calls) and activity_table.is_marked("awaits", *calls[0].place)


def _decides(thread: Thread, main: Thread, table: activity.Table) -> bool:
    """True if this thread, for which MainThread waits, tells more than MainThread does."""
    is_told = bool(user_frames(thread)) or table.classify_thread(thread).activity != "unknown"
    known = _doing(main, table).row
    return is_told and (thread.trains or known.work_is_in == "threads" or known.waits_for == "lock")


def _find_replacing_threads(
    doing: activity.StackActivity, others: Sequence[Thread], table: activity.Table
) -> tuple[Thread, ...]:
    """Return the threads that show the real wait of MainThread, which waits for them.

    For example, if the data loader waits for its pin-memory thread, and this thread waits for the GPU, return this
    thread.
    """
    operation = doing.row.unless_a_thread_is_in
    if operation is None:
        return ()
    classified = ((thread, table.classify_thread(thread)) for thread in others)
    return tuple(thread for thread, its in classified if its.operation == operation and its.row.waits_for == "gpu")


def _choose_thread(
    main: Thread | None, workers: Sequence[Thread], in_key: Sequence[Thread], table: activity.Table
) -> Thread | None:
    if main is None or not main.frames:
        return _best(workers, table) or main or (workers[0] if workers else None)
    match table.classify_thread(main).row.work_is_in:
        case "autograd":
            # Threads of compiled code that run Python hooks have no name, and threading.py did not start them.
            hooks = [one for one in workers if not one.name and not one.frames[-1].file.endswith("threading.py")]
            return _best(in_key, table) or _best(hooks, table) or main
        case "threads":
            return _best(workers, table) or main
    return main


def _best(threads: Iterable[Thread], table: activity.Table) -> Thread | None:
    """Return the thread with the lowest `tells` of the table, then with the smallest key; None if none has one."""
    telling = [
        (tells, stack_frames.key_places(thread.frames), thread)
        for thread in threads
        if (tells := table.classify_thread(thread).row.tells) is not None
    ]
    return min(telling, key=lambda found: found[:2])[2] if telling else None


def _python(thread: Thread) -> bool:
    return bool(stack_frames.python_frames(thread.frames))


def _is_service(thread: Thread) -> bool:
    """True for an idle pool thread, and for a thread that serves a library (queue feeder, progress bar, watchdog)."""
    return activity_table.has_mark("service", thread.frames) and not activity_table.has_mark("work", thread.frames)
