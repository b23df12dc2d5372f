"""Progress counters of real ranks over gloo: the main thread, a side thread, a stopped rank, new process groups."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hangwatch.model import ProcessId
from hangwatch.model.flight_records import ProgressCounter
from hangwatch.probes.torch_recorder.progress_counters import ProgressCounters
from tests.commands import first_line, spawn
from tests.conftest import identity, wait_for
from tests.integration import targets
from tests.other_users import needs_root
from tests.recorder_of_other_torch import Job, running

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

ORDERED = """
import os, threading
import torch, torch.distributed as dist
torch.set_num_threads(1)
def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def reduce(group=None):
    dist.all_reduce(torch.ones(4), group=group)
begin()
heartbeats = dist.new_group([0])
asked, done = threading.Semaphore(0), threading.Semaphore(0)
def side_thread():
    while True:
        asked.acquire()
        reduce(heartbeats)
        done.release()
threading.Thread(target=side_thread, daemon=True, name="heartbeat").start()
reduce()
os.mkfifo(folder + "/orders")
ready()
for number, order in enumerate(open(folder + "/orders")):
    if order == "main\\n":
        reduce()
    elif order == "side\\n":
        asked.release()
        done.acquire()
    else:
        dist.destroy_process_group()
        begin()
        reduce()
    open(f"{folder}/done-{number}", "w").close()
"""


FALSE_LIBRARY = Path(__file__).parents[1] / "jobs" / "false_library.py"


class Followed:
    """Counters that follow some processes."""

    def __init__(self, *processes: ProcessId) -> None:
        self.counters = ProgressCounters()
        self.counters.follow(dict.fromkeys(processes, "uid 0"))

    def read(self, process: ProcessId) -> ProgressCounter | None:
        self.counters.look()
        found = self.counters.read().get(process)
        return found if isinstance(found, ProgressCounter) else None

    def until_known(self, process: ProcessId) -> ProgressCounter:
        return wait_for(lambda: self.read(process), f"the counter of {process.pid}", 60)

    def until_more(self, process: ProcessId) -> ProgressCounter:
        before = self.until_known(process).total
        return wait_for(lambda: (now := self.read(process)) and now.total > before and now, "a new collective", 60)


def test_only_collectives_of_the_main_thread_count(tmp_path: Path) -> None:
    with targets.python(ORDERED, tmp_path) as pid, (tmp_path / "orders").open("w") as orders:
        process, sent = identity(pid), iter(range(100))
        followed = Followed(process)

        def order(text: str) -> ProgressCounter:
            orders.write(text + "\n")
            orders.flush()
            done = tmp_path / f"done-{next(sent)}"
            wait_for(done.exists, text)
            return followed.until_known(process)

        order("side")
        before = followed.until_known(process)
        assert order("main").total == before.total + 1
        wait_for(lambda: order("side").total == order("side").total, "the side thread to be recognized", 60)
        before = followed.until_known(process)
        assert [order("side").total - before.total for _ in range(5)] == [0] * 5
        assert order("main").total == before.total + 1
        assert order("reset").total > before.total


def test_stopped_rank_stops_the_counters_of_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path, Job(2)) as ranks:
        followed = Followed(*ranks)
        for rank in ranks:
            followed.until_more(rank)
        targets.stop(ranks[1].pid)
        targets.wait_until_blocked(ranks[0].pid)
        stopped = followed.until_known(ranks[0])
        assert [followed.read(ranks[0]) for _ in range(20)] == [stopped] * 20
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert followed.until_more(ranks[0]).restarts == stopped.restarts


def test_ended_process_has_no_counter(tmp_path: Path) -> None:
    with targets.python(ORDERED, tmp_path) as pid:
        process = identity(pid)
        followed = Followed(process)
        last = followed.until_known(process)
    assert followed.counters.read().get(process) == last, "the last value is kept while a read fails"
    followed.counters = ProgressCounters()
    followed.counters.follow({process: "uid 0"})
    assert followed.read(process) is None


@needs_root
def test_false_libraries_of_another_user_do_not_delay_the_counters(tmp_path: Path) -> None:
    """One thread finds the recorders of all owners. A false library takes longer than the time of one call."""
    count = 12
    with targets.python(ORDERED, tmp_path) as pid, spawn(sys.executable, FALSE_LIBRARY, tmp_path, count) as first:
        hostile = [identity(int(first_line(first))) for _ in range(count)]  # of user nobody
        process, counters, calls = identity(pid), ProgressCounters(), 0
        counters.follow({**dict.fromkeys(hostile, "uid 65534"), process: "uid 0"})
        while not isinstance(counters.read().get(process), ProgressCounter):
            counters.look()
            calls += 1
        assert calls < count
