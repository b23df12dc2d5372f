"""Limits on the stacks that are kept of a process. The main thread is kept first."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hangwatch.capture import stack_limits
from hangwatch.model import Frame, Thread
from hangwatch.state.incident_timeline import CAPTURES_KEPT

MEBIBYTE = 1 << 20


def thread(name: str, frames: int, length: int = 20) -> Thread:
    made = tuple(Frame(function=f"f{number}", file="x" * length, line=number) for number in range(frames))
    return Thread(name=name, thread_id=name, frames=made, is_main=name == "MainThread", installed_frames=frames)


THREADS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300)), max_size=12).map(
    lambda sizes: [
        thread("MainThread" if number == len(sizes) // 2 else f"Thread-{number}", *size)
        for number, size in enumerate(sizes)
    ]
)


def named(threads: Sequence[Thread]) -> list[str | None]:
    return [one.name for one in threads if not (one.name or "").startswith("<")]


@given(THREADS, st.integers(0, 200_000))
def test_what_is_kept_fits_and_the_main_thread_is_always_there(threads: list[Thread], most_bytes: int) -> None:
    kept = stack_limits.fit_threads(threads, most_bytes)
    if stack_limits.size_bytes(threads) <= most_bytes:
        assert kept == tuple(threads)
        return
    main = [one for one in kept if one.is_main]
    assert len(main) == 1
    rest = stack_limits.size_bytes(one for one in kept if one.frames or one.is_main)
    assert rest <= max(most_bytes, stack_limits.size_bytes(main))
    assert len(main[0].frames) <= 49 or stack_limits.size_bytes(main) <= most_bytes
    assert named(kept) == [name for name in named(threads) if name in named(kept)], "in their order"
    left = len(threads) - len(named(kept))
    assert left == 0 or kept[-1].name == f"<{left} threads not shown: the stack exceeds its size limit>"


def test_of_a_long_main_stack_both_ends_are_kept() -> None:
    (main,) = stack_limits.fit_threads([thread("MainThread", 200)], 0)
    assert [frame.function for frame in main.frames[:2]] == ["f0", "f1"]
    assert [frame.function for frame in main.frames[31:34]] == ["f31", "<frames left out>", "f184"]
    assert main.frames[-1].function == "f199"
    assert main.installed_frames == 32


def test_jobs_as_people_have_them_fit() -> None:
    """Keep all stacks of 16 ranks with 13 threads and 16 workers each, in three rounds, for one job and for two."""
    rank = [thread("MainThread", 60, 60), *(thread(f"Thread-{number}", 12, 60) for number in range(12))]
    worker = [thread("MainThread", 20, 60), thread("QueueFeederThread", 6, 60)]
    for jobs, ranks in ((1, 16), (2, 8)):
        capture_bytes = stack_limits.OF_OWNER_BYTES // (CAPTURES_KEPT * jobs)
        room = stack_limits.divide_budget(capture_bytes, ranks, 16 * ranks, rounds=3)
        assert stack_limits.fit_threads(rank, room.rank_bytes) == tuple(rank)
        assert stack_limits.fit_threads(worker, room.worker_bytes) == tuple(worker)


@given(st.integers(1, 64 * MEBIBYTE), st.integers(0, 1024), st.integers(0, 4096), st.integers(0, 10))
def test_all_processes_together_fit_into_a_capture(capture_bytes: int, ranks: int, workers: int, rounds: int) -> None:
    room = stack_limits.divide_budget(capture_bytes, ranks, workers, rounds)
    assert (room.rank_bytes * ranks + room.worker_bytes * workers) * rounds <= capture_bytes
