"""Pure: where a process is, judged by all of its Python threads together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from hangwatch.model import Thread
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames


class ProcessPlace(NamedTuple):
    """Where a process is: its activity, and a key that is equal for all processes at the same place.

    `telling` is the thread that decides, `others` are the threads shown next to it: both as indexes into the dump's
    threads.
    """

    key: str
    doing: activity.StackActivity
    waits_for: str
    phase: str | None
    telling: int | None
    others: tuple[int, ...]


def find_standing(threads: Sequence[Thread], table: activity.Table) -> ProcessPlace:
    """Return where the process with these threads is.

    MainThread decides. Another thread decides instead if MainThread waits for it, if MainThread is in the backward pass
    (its hooks run in autograd's threads), or if MainThread is not in the dump. Threads in a collective belong to the
    key, too. Other threads do not: it does not matter if only one rank has them.
    """
    main = stack_frames.main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and _python(thread))
    workers = tuple(thread for thread in others if not _is_service(thread))
    in_key = tuple(
        thread for thread in workers if activity.find_activity(table.classify_thread(thread).activity).in_key
    )
    telling = _choose_thread(main, workers, in_key, table)
    frames = telling.frames if telling else ()
    doing = _doing(telling, table) if telling else table.classify(())
    instead = _find_replacing_threads(doing, others, table)
    shown = dict.fromkeys(stack_frames.key_places(thread.frames) for thread in in_key if thread is not telling)
    main_places = stack_frames.key_places(main.frames) if main else ()
    telling_places = stack_frames.key_places(frames) if telling is not main else ()
    if instead:
        doing = table.classify_thread(instead[0])
    beside = [*instead, *((main, *workers) if main else workers)]
    places = {id(thread): place for place, thread in enumerate(threads)}
    return ProcessPlace(
        key=_digest(main_places, telling_places, tuple(sorted(shown)), doing),
        doing=doing,
        waits_for=activity.find_activity(doing.activity).waits_for,
        phase=table.phase(frames) or (table.phase(main.frames) if main else None),
        telling=places[id(telling)] if telling else None,
        others=tuple(places[id(thread)] for thread in beside if thread is not telling and _python(thread)),
    )


def _doing(thread: Thread, table: activity.Table) -> activity.StackActivity:
    """Return what a thread does. If it waits for a thread, queue or child process: what it started that for."""
    doing = table.classify_thread(thread)
    if activity.find_activity(doing.activity).waits_for == "thread":
        around = table.context(thread.frames)
        if around is not None and activity.find_activity(around.activity).waits_for == "nothing":
            return around
    return doing


def _find_replacing_threads(
    doing: activity.StackActivity, others: Sequence[Thread], table: activity.Table
) -> tuple[Thread, ...]:
    """Return the threads that show the real wait: a loader behind its pin-memory thread waits for the GPU."""
    operation = activity.find_activity(doing.activity).unless_a_thread_is_in
    if operation is None:
        return ()
    return tuple(thread for thread in others if _is_behind_gpu(table.classify_thread(thread), operation))


def _is_behind_gpu(doing: activity.StackActivity, operation: str) -> bool:
    return doing.operation == operation and activity.find_activity(doing.activity).waits_for == "gpu"


def _choose_thread(
    main: Thread | None, workers: Sequence[Thread], in_key: Sequence[Thread], table: activity.Table
) -> Thread | None:
    if main is None or not main.frames:
        return _best(workers, table) or main or (workers[0] if workers else None)
    match activity.find_activity(table.classify_thread(main).activity).work_is_in:
        case "autograd":
            return _best(in_key, table) or _best(filter(_is_autograd_thread, workers), table) or main
        case "threads":
            return _best(workers, table) or main
    return main


def _is_autograd_thread(thread: Thread) -> bool:
    """True for a thread that compiled code started to run Python hooks: it has no name and no start in threading.py."""
    return not thread.name and not thread.frames[-1].file.endswith("threading.py")


def _best(threads: Iterable[Thread], table: activity.Table) -> Thread | None:
    """Return the thread that tells most, by the column `tells`; among equals the one with the smallest stack."""
    telling = [
        (tells, stack_frames.key_places(thread.frames), thread)
        for thread in threads
        if (tells := activity.find_activity(table.classify_thread(thread).activity).tells) is not None
    ]
    return min(telling, key=lambda found: found[:2])[2] if telling else None


def _python(thread: Thread) -> bool:
    return any(not stack_frames.is_native(frame.function, frame.file) for frame in thread.frames)


def _is_service(thread: Thread) -> bool:
    """True for a thread that serves a library (queue feeder, progress bar, watchdog) and an idle pool thread."""
    return _has("service", thread) and not _has("work", thread)


def _has(mark: activity.Mark, thread: Thread) -> bool:
    return any(activity.is_marked(mark, frame.function, frame.file) for frame in thread.frames)


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()
