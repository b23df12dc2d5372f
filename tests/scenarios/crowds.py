"""Scenarios with many jobs of real processes on one node, at the same time, under one daemon."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hangwatch.model import JobState
from tests.scenarios.external_servers import answering, beating, disk, sending, taking, vanishing
from tests.scenarios.power import Expected, with_names
from tests.scenarios.processes import HANG, LOOK
from tests.scenarios.stage import Crowd, Neighbour, Observed, Stage, at_zero_in_a_hang, of_light_job

WAIT_SECONDS = 12.0
BYTES_PER_SECOND = 400_000
SHARD_BYTES = int(WAIT_SECONDS) * BYTES_PER_SECOND


@contextlib.contextmanager
def file_on_disk(bytes_per_second: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder), bytes_per_second) as storage:
        yield f"{storage.folder}/checkpoint.pt"


def resumes(order: str, serve: Callable[[], Any] = contextlib.nullcontext) -> Callable[[Stage], Observed]:
    """Return a function that gives `order` to all ranks until the job resumes. `{}` is what `serve` yields."""

    def play(stage: Stage) -> Observed:
        with serve() as served:
            stage.trouble("all", order.format(served))
            return stage.until_resumed().observed()

    return play


def wait_for_good(way: str, task: str) -> Callable[[Stage], Observed]:
    """Return a function that lets rank 0 wait for something that never comes, see `long_waits`."""

    def play(stage: Stage) -> Observed:
        path = stage.node.folder / "dead"
        os.mkfifo(path)
        with beating(1.0 if way == "exporter" else 0.3) as port:
            stage.trouble("all", f"wait-long {way} {task} {path if task in ('opens', 'starts') else port}")
            observed = stage.until_page().observed()
            os.close(os.open(path, os.O_RDWR))  # ends the program that opens the FIFO
            return observed

    return play


def pause_that_comes_back(stage: Stage) -> Observed:
    word = stage.node.folder / "word"
    os.mkfifo(word)
    longer_seconds = 10.0  # the known pause is longer than the second one, also on a busy machine
    for more_seconds in (longer_seconds, 0.0):
        stage.trouble("all", f"ask-for-word {word}")
        stage.until(JobState.HUNG).watcher.follow(more_seconds)
        word.write_text("go on")
        stage.until_resumed().watcher.follow(3.0)
    return stage.observed()


def over_but_uploads(stage: Stage) -> Observed:
    with taking(BYTES_PER_SECOND) as port:
        stage.trouble("all", f"end-but-upload {port} 8 {3 * SHARD_BYTES}")
        stage.until(JobState.OVER).watcher.follow(2 * WAIT_SECONDS)
        return stage.observed()


def late_ranks(stage: Stage) -> Observed:
    return stage.until(JobState.STALLED, JobState.HUNG).until(JobState.RECOVERED, JobState.TRAINING).observed()


def give_order(rank: int | str, order: str) -> Callable[[Stage], Observed]:
    """Return a function that sends `order` to `rank`, which makes the job hang, and then waits for the page."""

    def play(stage: Stage) -> Observed:
        stage.trouble(rank, order)
        return stage.until_page().observed()

    return play


def whom_is_gone(stage: Stage) -> Observed:
    with vanishing() as port:
        stage.trouble("all", f"ask-whom-is-gone {port} 1")
        return stage.until_page().observed()


def saves_behind_gpu(stage: Stage) -> Observed:
    with file_on_disk(1) as path:
        stage.trouble("all", f"save-behind-gpu 2 {path} {1 << 20}")
        return stage.until_page().observed()


def _healthy(play: Callable[[Stage], Observed], states: str = LOOK, **options: Any) -> Neighbour:
    expected = Expected(states, pages_before=options.pop("pages_before", 0))
    return Neighbour(play, expected, **options)


def _hang(
    play: Callable[[Stage], Observed], named: tuple[int, ...] = (), states: str = HANG, **options: Any
) -> Neighbour:
    expected = Expected(states, True, named, 118.0, action=options.pop("action", "investigate"))
    return Neighbour(play, expected, **options)


_LOOK_ALIKES = {
    # twice rank 0 waits at the same place until it is told to go on, and the others wait for it
    "a pause that comes back": _healthy(
        pause_that_comes_back,
        f"{HANG} → recovered( → training)? → quiet → suspected → hung → recovered",
        pages_before=1,
    ),
    # rank 0 is 12 s in fsync while the device writes 400 kB/s, the others wait
    "slow fsync": _healthy(
        resumes(f"sync-checkpoint {{}} {SHARD_BYTES}", serve=lambda: file_on_disk(BYTES_PER_SECOND))
    ),
    # rank 0 receives 400 kB/s for 12 s, the others wait
    "shards into memory": _healthy(
        resumes(f"receive-shard {{}} {SHARD_BYTES}", serve=lambda: sending(BYTES_PER_SECOND, WAIT_SECONDS))
    ),
    # rank 0 uploads eight parts for 12 s, four at a time, each in a thread; the others wait
    "multipart upload": _healthy(
        resumes(f"upload-parts {{}} 8 {SHARD_BYTES // 8}", serve=lambda: taking(BYTES_PER_SECOND))
    ),
    # rank 0 uploads to a server that receives nothing for 12 s, in its main thread or in another; the others wait
    **{
        f"an upload that stalls, {where}": _healthy(
            resumes(f"{order} {SHARD_BYTES // 24}", serve=lambda: taking(BYTES_PER_SECOND, WAIT_SECONDS))
        )
        for where, order in (("in a thread", "upload-parts {} 1"), ("in its main thread", "upload-whole {}"))
    },
    "a loader that uploads": _healthy(
        resumes("wait-long loader uploads {}", serve=lambda: taking(1 << 24, WAIT_SECONDS))
    ),
    # rank 0 evaluates for 12 s and sleeps in between, the others wait
    "evaluation with sleeps": _healthy(resumes(f"evaluate-slowly {WAIT_SECONDS}"), ranks=4),
    # rank 0 waits for a program that sleeps for 12 s and has no connection; the others wait for rank 0
    "an idle child": _healthy(resumes(f"wait-for-idle-child {WAIT_SECONDS} exit")),
    # the same, and rank 0 reads what that program will say
    "the output of an idle child": _healthy(resumes(f"wait-for-idle-child {WAIT_SECONDS} output")),
    # rank 0 waits for its own worker, process, native thread, or for space in a pipe or queue, and that waits for 12 s
    "a loader that sleeps": _healthy(resumes(f"wait-long loader sleeps {WAIT_SECONDS}")),
    **{
        f"a {way} that {task}": _healthy(resumes(f"wait-long {way} {task} {{}}", serve=lambda: answering(WAIT_SECONDS)))
        for way, task in (
            ("loader", "asks"),
            ("process", "asks"),
            ("client", "lock"),
            ("client", "eventfd"),
            ("pipe", "asks"),
            ("queue", "asks"),
            ("pool", "asks"),
            ("executor", "asks"),
            ("manager", "asks"),
            ("loop", "asks"),
            ("loop", "thread"),
        )
    },
    # rank 0 is at the prompt of pdb for 12 s, the others wait
    "a person in a debugger": _healthy(resumes(f"debug {WAIT_SECONDS}")),
    # the others have ended; rank 0 keeps the job alive. A server without CPU receives nothing for seconds: stalled
    "training over, rank 0 uploads": _healthy(over_but_uploads, "training → quiet → suspected → (stalled → )?over"),
    # half of the ranks have no process for 16 s, the others wait for them to join
    "ranks that come late": _healthy(
        late_ranks,
        "suspected → (stalled → recovered( → training)?|training)",
        ranks=4,
        begins=JobState.STARTING,
        program="tests.scenarios.late_launcher",
    ),
}
LOOK_ALIKES = Crowd(
    "look-alikes at once", with_names(_LOOK_ALIKES), startup_hold_seconds=3.0, stalled_hold_seconds=60.0
)

# all at once rank 1 of each job waits for a loader worker that reads from storage that does not respond; the eleventh
# job has another owner
STORAGE_DIES = Crowd(
    "storage dies under eleven jobs",
    tuple(
        _hang(give_order(1, "loader"), (1,), name="storage dies, one of 11 jobs", is_apart=number == 11)
        for number in range(1, 12)
    ),
)

_HANGS = {
    # 250 W at work, 140 W in the hang, and the line at 133 W: power alone would never tell
    "light job hangs over its line": _hang(
        give_order(2, "lock"), (2,), "training → suspected → hung", ranks=4, shown=of_light_job
    ),
    # rank 2 waits for a lock, the others spin in C: the page waits for stalled_hold_seconds
    "victims with GPUs at 0 %": _hang(
        give_order("all", "behind-gpu 2"),
        states="training → quiet → suspected → stalled",
        ranks=4,
        shown=at_zero_in_a_hang,
    ),
    # rank 2 waits for a lock, the others loop in two lines of Python: the page waits for stalled_hold_seconds
    "victims that ask in Python": _hang(
        give_order("all", "poll-gpu 2"),
        states="training → quiet → suspected → (training → (quiet → )?suspected → )?stalled",
        ranks=4,
        shown=at_zero_in_a_hang,
    ),
    # rank 1 sends a request that is not acknowledged, the others wait
    "a request to a server that is gone": _hang(whom_is_gone, (1,), ranks=4),
    # rank 0 waits for its own worker, process or thread, and that never ends; the others wait
    **{
        f"a {way} that {task} for good": _hang(wait_for_good(way, task), (0,))
        for way, task in (
            ("loader", "stops"),
            ("process", "opens"),
            ("process", "stops"),
            ("pipe", "stops"),
            ("queue", "stops"),
            ("pool", "opens"),
            ("manager", "opens"),
            ("process", "starts"),
            ("process", "traced"),
            ("heartbeat", "lock"),
            ("heartbeat", "eventfd"),
            ("exporter", "lock"),
            ("circle", "-"),
        )
    },
    # rank 0 waits for an event loop that waits for an event of its own program
    "a loop that never ends": _hang(wait_for_good("loop", "never"), (0,), action="fix_program"),
    # all ranks of this node are stopped, and those of another node wait for them
    "suspended, and ranks elsewhere": _hang(
        give_order("all", "stop-all"), states="training → quiet → suspected → suspended", nodes=2
    ),
    # rank 0 waits for its GPU in a call that saves; rank 2 is stuck in fsync
    "a victim inside torch.save": _hang(saves_behind_gpu, (2,), ranks=4),
}
HANGS = Crowd("hangs at once", with_names(_HANGS))

_DRIVEN = {
    # rank 0 waits for the holder of a socket that no process has open
    "a peer that is not found": _healthy(resumes(f"wait-long hidden {WAIT_SECONDS} -")),
    # the same, for good: the page waits for stalled_hold_seconds
    "a peer that is not found, for good": _hang(
        give_order("all", "wait-long hidden 3600 -"), (0,), "training → quiet → suspected → stalled"
    ),
    # all ranks wait for their driver, which computes
    **{
        f"actors of a driver that computes, over {way}": _healthy(
            resumes(f"ask-driver {way} computes"), program="tests.scenarios.driven"
        )
        for way in ("unix", "tcp")
    },
    # all ranks wait for their driver, and that for rank 2, which opens a FIFO
    **{
        f"actors behind one that opens a FIFO, over {way}": _hang(
            give_order("all", f"ask-driver {way} waits"), (2,), ranks=4, program="tests.scenarios.driven"
        )
        for way in ("unix", "tcp")
    },
    # rank 0 waits for a lock beside a connection to the driver that lives; the others wait for rank 0
    "an actor in a lock": _hang(
        give_order("all", "ask-driver tcp pings"), (0,), ranks=4, program="tests.scenarios.driven"
    ),
}
DRIVEN = Crowd("actors and drivers at once", with_names(_DRIVEN), stalled_hold_seconds=12.0)

CROWDS = (LOOK_ALIKES, STORAGE_DIES, HANGS, DRIVEN)
