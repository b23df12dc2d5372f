"""Sleeps and timed waits of main threads, which end by themselves. Pure."""

from collections.abc import Sequence

from hangwatch.model import STOPPED_STATES, ProcessDump, RankDump, Sleep, Thread
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import ProcessActivity


def find_sleep(rank: RankDump, activities: Sequence[ProcessActivity | None]) -> Sleep | None:
    """Return the sleep of a rank, if its main thread was asleep in the same place in every round; else None.

    A sleep of the thread that the main thread waits for counts, too. A timed wait that a library calls is not a sleep:
    the library polls in a loop. Nor is a wait for ranks, the GPU, the store, or a peer outside of the job. A process
    that is stopped or frozen does not wake.
    """
    asleep = [
        (dump, process_activity)
        for dump, process_activity in zip(rank.rounds, activities, strict=True)
        if dump.main.call is not None and process_activity is not None
    ]
    if not asleep or not all(_is_sleep(dump, process_activity) for dump, process_activity in asleep):
        return None
    places = {_hash_place(dump, process_activity.find_telling(dump)) for dump, process_activity in asleep}
    remaining_seconds = [dump.main.call.left_seconds or 0.0 for dump, _ in asleep if dump.main.call]
    last = asleep[-1][0].main.call
    if len(places) > 1 or last is None or last.until_unix_seconds is None:
        return None
    return Sleep(until_unix_seconds=last.until_unix_seconds, seconds=max(remaining_seconds), place=places.pop())


def _is_sleep(dump: ProcessDump, process_activity: ProcessActivity) -> bool:
    main, call = stack_frames.main_thread(dump.threads), dump.main.call
    if main is None or call is None or call.left_seconds is None or dump.waits.waits_in_torch:
        return False
    telling = process_activity.find_telling(dump)
    is_decided = telling is main or process_activity.telling in process_activity.awaited
    waits = (dump.waits.awaited, dump.waits.asks_rank, dump.waits.awaits_store, dump.waits.frozen_cgroup)
    is_held = dump.state in STOPPED_STATES or any(each is not None for each in waits)
    if process_activity.waits_for == "ranks" or not is_decided or is_held:
        return False
    waiter = telling if telling is not None and telling.trains else main
    return call.kind == "sleeps" or (dump.waits.waits_in_torch is False and _is_called_by_program(waiter))


def _is_called_by_program(thread: Thread) -> bool:
    """True if the program called the innermost function, either directly or through Python's standard library."""
    owned = stack_frames.find_owners([frame.file for frame in thread.frames], thread.installed_frames)
    for frame, is_users in zip(thread.frames, owned, strict=True):
        is_standard = not is_users and stack_frames.is_standard(stack_frames.short_path(frame.file))
        if not is_standard and not stack_frames.is_native(frame.function, frame.file):
            return is_users is not False
    return False


def _hash_place(dump: ProcessDump, deciding: Thread | None) -> str:
    main = stack_frames.main_thread(dump.threads)
    threads = (main, None if deciding is main else deciding)
    frames = stack_frames.python_frames(frame for thread in threads if thread is not None for frame in thread.frames)
    return stack_frames.digest([(*frame.place, frame.line) for frame in frames])
