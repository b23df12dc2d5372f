"""Pure: where one process stands, told by all of its Python threads together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from hangwatch.hang import activity
from hangwatch.hang import frames as stack_frames
from hangwatch.model import Frame, Thread

_SERVICE = re.compile(
    r"^(_pin_memory_loop|_feed|_monitor|watchdog.*|.*_watchdog|heartbeat.*|.*_heartbeat.*|serve_forever|_serve|accept"
    r"|_read_thread|usage_.*|poll_.*|_collect_.*|check_.*alive.*)$"
)
_SERVICE_FILES = re.compile(
    r"(^|/)(tqdm|wandb|tensorboard|tensorboardX|prometheus_client|mlflow|sentry_sdk|opentelemetry)/"
)
_MEANS_IT = frozenset({"collective_wait", "point_to_point"})
_WORKS = tuple(
    "collective_wait point_to_point rendezvous checkpoint storage compile data_loading debugger "  # noqa: SIM905 - an order
    "gpu_sync backward optimizer evaluation forward".split()
)
_LEAVES_IT_TO_A_THREAD = frozenset({"thread_wait", "rpc_wait"})


class Standing(NamedTuple):
    """Where a process stands: what it is doing, the thread that tells, the other Python threads, and a key."""

    key: str
    doing: activity.Doing
    waits_for: str
    phase: str | None
    thread: Thread | None
    others: tuple[Thread, ...]


def of(threads: Sequence[Thread], table: activity.Table) -> Standing:
    """Where the process of these threads stands.

    MainThread tells. Another thread tells in its place when MainThread waits for it, is in the backward pass (whose
    hooks run in autograd's threads), or is not in the dump. Threads in a collective belong to the key beside
    MainThread; other threads do not: that one rank has them is no news.
    """
    main = stack_frames.main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and _python(thread))
    workers = tuple(thread for thread in others if not _is_service(thread))
    collective = tuple(thread for thread in workers if table.classify(thread.frames).activity in _MEANS_IT)
    telling = _telling(main, workers, collective, table)
    frames = telling.frames if telling else ()
    doing = _doing(frames, table)
    pinning = tuple(thread for thread in others if _pins(thread, table)) if doing.activity == "data_loading" else ()
    if pinning:
        doing = activity.Doing("gpu_sync", "pin_memory", waits=False)
    shown = dict.fromkeys(stack_frames.key_places(thread.frames) for thread in collective if thread is not telling)
    main_places = stack_frames.key_places(main.frames) if main else ()
    telling_places = stack_frames.key_places(frames) if telling is not main else ()
    return Standing(
        key=_digest(main_places, telling_places, tuple(sorted(shown)), doing),
        doing=doing,
        waits_for=table.waits_for(doing.activity),
        phase=table.phase(frames) or (table.phase(main.frames) if main else None),
        thread=telling,
        others=tuple(
            thread
            for thread in (*pinning, *((main, *workers) if main else workers))
            if thread is not telling and _python(thread)
        ),
    )


def _doing(frames: Sequence[Frame], table: activity.Table) -> activity.Doing:
    """What a stack does; one that waits for a thread, queue or child process does what it started that for."""
    doing = table.classify(frames)
    if table.waits_for(doing.activity) == "thread":
        around = table.context(frames)
        if around is not None and table.waits_for(around.activity) == "nothing":
            return around
    return doing


def _telling(
    main: Thread | None, workers: Sequence[Thread], collective: Sequence[Thread], table: activity.Table
) -> Thread | None:
    if main is None or not main.frames:
        return _best(workers, table) or main or (workers[0] if workers else None)
    doing = table.classify(main.frames)
    if doing.activity == "backward":
        return _best(collective, table) or _best((one for one in workers if _of_engine(one)), table) or main
    if doing.activity in _LEAVES_IT_TO_A_THREAD:
        return _best(workers, table) or main
    return main


def _of_engine(thread: Thread) -> bool:
    """A thread that compiled code started and that runs Python hooks: it has no name and no start in threading.py."""
    return not thread.name and not thread.frames[-1].file.endswith("threading.py")


def _best(threads: Iterable[Thread], table: activity.Table) -> Thread | None:
    """The thread that says most, in the order of `_WORKS`; among equals the smallest stack, whatever their order."""
    known = [
        (_WORKS.index(doing.activity), stack_frames.key_places(thread.frames), thread)
        for thread in threads
        for doing in (table.classify(thread.frames),)
        if doing.activity in _WORKS
    ]
    return min(known, key=lambda one: one[:2])[2] if known else None


def _python(thread: Thread) -> bool:
    return any(not stack_frames.is_native(frame.function, frame.file) for frame in thread.frames)


def _is_service(thread: Thread) -> bool:
    """Threads that serve a library (queue feeders, pin memory, progress bars, watchdogs) and idle pool threads."""
    return any(
        _SERVICE.match(stack_frames.plain_name(frame.function)) or _SERVICE_FILES.search(frame.file)
        for frame in thread.frames
    ) and not any(frame.file.endswith("distributed_c10d.py") for frame in thread.frames)


def _pins(thread: Thread, table: activity.Table) -> bool:
    """A pin-memory thread inside a CUDA call: the loader behind it waits for the GPU, not for data."""
    doing = table.classify(thread.frames)
    return doing.activity == "gpu_sync" and doing.operation == "pin_memory"


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()
