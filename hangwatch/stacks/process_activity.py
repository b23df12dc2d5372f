"""Pure: where one process stands, told by all of its Python threads together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from hangwatch.model import Thread
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames


class Standing(NamedTuple):
    """Where a process stands: what it is doing, and a key that is the same for all that stand there.

    `telling` is the thread that tells, `others` are those that are shown beside it: places in the dump's threads.
    """

    key: str
    doing: activity.Doing
    waits_for: str
    phase: str | None
    telling: int | None
    others: tuple[int, ...]


def find_standing(threads: Sequence[Thread], table: activity.Table) -> Standing:
    """Where the process of these threads stands.

    MainThread tells. Another thread tells in its place when MainThread leaves the work to it (it waits for it, or is in
    the backward pass, whose hooks run in autograd's threads), or when MainThread is not in the dump. Threads in a
    collective belong to the key beside MainThread; other threads do not: that one rank has them is no news.
    """
    main = stack_frames.main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and _python(thread))
    workers = tuple(thread for thread in others if not _is_service(thread))
    in_key = tuple(thread for thread in workers if activity.known(table.classify_thread(thread).activity).in_key)
    telling = _telling(main, workers, in_key, table)
    frames = telling.frames if telling else ()
    doing = _doing(telling, table) if telling else table.classify(())
    instead = _in_its_stead(doing, others, table)
    shown = dict.fromkeys(stack_frames.key_places(thread.frames) for thread in in_key if thread is not telling)
    main_places = stack_frames.key_places(main.frames) if main else ()
    telling_places = stack_frames.key_places(frames) if telling is not main else ()
    if instead:
        doing = table.classify_thread(instead[0])
    beside = [*instead, *((main, *workers) if main else workers)]
    places = {id(thread): place for place, thread in enumerate(threads)}
    return Standing(
        key=_digest(main_places, telling_places, tuple(sorted(shown)), doing),
        doing=doing,
        waits_for=activity.known(doing.activity).waits_for,
        phase=table.phase(frames) or (table.phase(main.frames) if main else None),
        telling=places[id(telling)] if telling else None,
        others=tuple(places[id(thread)] for thread in beside if thread is not telling and _python(thread)),
    )


def _doing(thread: Thread, table: activity.Table) -> activity.Doing:
    """What a thread does; one that waits for a thread, queue or child process does what it started that for."""
    doing = table.classify_thread(thread)
    if activity.known(doing.activity).waits_for == "thread":
        around = table.context(thread.frames)
        if around is not None and activity.known(around.activity).waits_for == "nothing":
            return around
    return doing


def _in_its_stead(doing: activity.Doing, others: Sequence[Thread], table: activity.Table) -> tuple[Thread, ...]:
    """Threads that show what the process waits for instead: a loader behind its pin-memory thread waits for the GPU."""
    operation = activity.known(doing.activity).unless_a_thread_is_in
    if operation is None:
        return ()
    return tuple(thread for thread in others if _is_behind_gpu(table.classify_thread(thread), operation))


def _is_behind_gpu(doing: activity.Doing, operation: str) -> bool:
    return doing.operation == operation and activity.known(doing.activity).waits_for == "gpu"


def _telling(
    main: Thread | None, workers: Sequence[Thread], in_key: Sequence[Thread], table: activity.Table
) -> Thread | None:
    if main is None or not main.frames:
        return _best(workers, table) or main or (workers[0] if workers else None)
    match activity.known(table.classify_thread(main).activity).work_is_in:
        case "autograd":
            return _best(in_key, table) or _best(filter(_of_engine, workers), table) or main
        case "threads":
            return _best(workers, table) or main
    return main


def _of_engine(thread: Thread) -> bool:
    """A thread that compiled code started and that runs Python hooks: it has no name and no start in threading.py."""
    return not thread.name and not thread.frames[-1].file.endswith("threading.py")


def _best(threads: Iterable[Thread], table: activity.Table) -> Thread | None:
    """The thread that says most, by the column `tells`; among equals the smallest stack, whatever their order."""
    telling = [
        (tells, stack_frames.key_places(thread.frames), thread)
        for thread in threads
        if (tells := activity.known(table.classify_thread(thread).activity).tells) is not None
    ]
    return min(telling, key=lambda found: found[:2])[2] if telling else None


def _python(thread: Thread) -> bool:
    return any(not stack_frames.is_native(frame.function, frame.file) for frame in thread.frames)


def _is_service(thread: Thread) -> bool:
    """Threads that serve a library (queue feeders, pin memory, progress bars, watchdogs) and idle pool threads."""
    return _has("service", thread) and not _has("work", thread)


def _has(mark: activity.Mark, thread: Thread) -> bool:
    return any(activity.is_marked(mark, frame.function, frame.file) for frame in thread.frames)


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()
