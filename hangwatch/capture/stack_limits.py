"""Limit the kept stacks of each process, so that the jobs of one owner cannot fill the daemon's memory.

This module drops threads, and the middle of a long main stack. The parsers of stacks already cut long names. The
result for a process does not depend on other processes, so a stack that has not changed is equal in each round.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.model import Frame, Thread

FRAME_BYTES = 200  # in memory and in an incident.json, in addition to its names
OF_OWNER_BYTES = 64 << 20  # stacks in the kept captures of one owner; the owner's hung jobs divide it
INNERMOST_FRAMES, OUTERMOST_FRAMES = 32, 16  # kept of every main thread, even above the limit


class StackBudget(NamedTuple):
    """Limits in bytes on the stacks of one rank and of one worker in one round."""

    rank_bytes: int
    worker_bytes: int


def divide_budget(capture_bytes: int, ranks: int, workers: int, rounds: int) -> StackBudget:
    """Divide the bytes of a capture: half for its ranks, half for their workers."""
    half = capture_bytes // (2 * max(1, rounds))
    return StackBudget(half // max(1, ranks), half // max(1, workers))


def fit_threads(threads: Sequence[Thread], most_bytes: int) -> tuple[Thread, ...]:
    """Return the threads that fit into the limit, in their order. The main thread is always kept, but may be shortened.

    If threads are dropped, a thread without frames is added. Its name has their number.
    """
    if size_bytes(threads) <= most_bytes:
        return tuple(threads)
    shortened = [_shortened(thread, most_bytes) if thread.is_main else thread for thread in threads]
    left_bytes = most_bytes - size_bytes(thread for thread in shortened if thread.is_main)
    kept: list[Thread] = []
    for thread in shortened:
        if not thread.is_main:
            left_bytes -= size_bytes([thread])
        if thread.is_main or left_bytes >= 0:
            kept.append(thread)
    if count := len(shortened) - len(kept):
        kept.append(
            Thread(name=f"<{count:,} threads not shown: the stack exceeds its size limit>", thread_id="", frames=())
        )
    return tuple(kept)


def size_bytes(threads: Iterable[Thread]) -> int:
    """Return the approximate size of stacks in bytes."""
    return sum(FRAME_BYTES + sum(map(_frame_bytes, thread.frames)) for thread in threads)


def _frame_bytes(frame: Frame) -> int:
    values = sum(len(name) + len(text) for name, text in frame.locals)
    return FRAME_BYTES + len(frame.function) + len(frame.file) + values


def _shortened(thread: Thread, most_bytes: int) -> Thread:
    if len(thread.frames) <= INNERMOST_FRAMES + OUTERMOST_FRAMES or size_bytes([thread]) <= most_bytes:
        return thread
    left_out = Frame(function="<frames left out>", file="<hangwatch>")
    frames = (*thread.frames[:INNERMOST_FRAMES], left_out, *thread.frames[-OUTERMOST_FRAMES:])
    installed = thread.installed_frames
    return replace(
        thread, frames=frames, installed_frames=None if installed is None else min(installed, INNERMOST_FRAMES)
    )
