"""Progress counters from synthetic memories: drawn tables of groups, changed bytes, hostile tables, threads."""

import os
import random
import struct
from collections.abc import Container
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import ProgressCounter
from hangwatch.probes.process.memory_image import UnreadableError
from hangwatch.probes.torch_recorder import Recorders, decode, layouts
from hangwatch.probes.torch_recorder.progress_counters import ProgressCounters
from hangwatch.probes.torch_recorder.threads import TID_OFFSET
from tests.recorder_memory import Group, Memory, Operation, as_process, recorder

ALL = layouts.candidates("")
NEWEST = ALL[-1]
PID = 4711
THREAD = 0x7F1234  # of each record of `recorder_memory`


def written(
    counts: dict[int, int], layout: layouts.Layout = NEWEST, overwritten: Container[int] = ()
) -> tuple[Memory, int]:
    memory = Memory(0x10000000)
    groups = [Group(id=group, name=str(group), counts=(count, -1, -1)) for group, count in counts.items()]
    operations = [Operation(group=group) for group, count in counts.items() if count > 0 and group not in overwritten]
    return memory, recorder(memory, layout, operations, groups)


@given(
    st.dictionaries(st.integers(0, 2**40), st.integers(-1, 2**53 - 1), max_size=decode.MOST_COUNTED_GROUPS),
    st.sampled_from(ALL),
)
def test_drawn_groups_are_counted(counts: dict[int, int], layout: layouts.Layout) -> None:
    memory, address = written(dict(sorted(counts.items())), layout)
    assert decode.last_enqueued(memory.read, address, layout).by_group == counts


@given(st.integers(0, 10**6))
def test_changed_memory_gives_bounded_numbers_or_a_fault(seed: int) -> None:
    drawn = random.Random(seed)
    memory, address = written({group: drawn.randrange(1000) for group in range(drawn.randrange(1, 9))})
    first, end = memory.range
    for _ in range(drawn.randrange(1, 4)):
        place = drawn.choice([address + NEWEST.statuses + 8 * drawn.randrange(6), drawn.randrange(first, end - 8)])
        memory.put(place & ~7, "Q", drawn.choice([0, 1, 2**63, 10**18, drawn.randrange(first, end), 2**64 - 1]))
    try:
        read = decode.last_enqueued(memory.read, address, NEWEST).by_group
    except UnreadableError:
        return
    assert len(read) <= decode.MOST_COUNTED_GROUPS and all(-1 <= number < 2**53 for number in read.values())


def test_cycle_in_the_table_is_a_fault() -> None:
    memory, address = written(dict.fromkeys(range(7), 3))
    (root,) = struct.unpack("<Q", memory.bytes_at(address + NEWEST.statuses + 16, 8))
    memory.put(root + 16, "Q", root)
    with pytest.raises(UnreadableError):
        decode.last_enqueued(memory.read, address, NEWEST)


def test_too_many_groups_are_a_fault() -> None:
    memory, address = written(dict.fromkeys(range(decode.MOST_COUNTED_GROUPS + 1), 3))
    with pytest.raises(UnreadableError, match="TooLarge"):
        decode.last_enqueued(memory.read, address, NEWEST)


class Rank:
    """A rank in a tree like /proc, with a recorder of two groups. Its main thread has used the first group."""

    def __init__(self, root: Path, pid: int = PID, owner: str = "uid 1000", overwritten: Container[int] = ()) -> None:
        self.process, self.owner, self.folder, self.now = ProcessId(pid=pid, start_ticks=9), owner, root / str(pid), 0.0
        self.folder.mkdir(parents=True)
        fields = ["S", "1", *["0"] * 17, "9", *["0"] * 30]
        (self.folder / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
        (self.folder / "status").write_text(f"Name:\tpython\nNSpid:\t{pid}\n")
        self.name_thread(pid, "python")
        self.memory, self.address = written({0: 5, 1: 7}, overwritten=overwritten)
        as_process(self.folder, self.memory, self.address)
        self.use_thread(pid)
        self.counters = ProgressCounters(Recorders(root), root, lambda: self.now)

    def name_thread(self, tid: int, name: str) -> None:
        (self.folder / f"task/{tid}").mkdir(parents=True)
        (self.folder / f"task/{tid}/comm").write_text(f"{name}\n")

    def use_thread(self, tid: int) -> None:
        with (self.folder / "mem").open("r+b") as memory:
            memory.seek(THREAD + TID_OFFSET)
            memory.write(struct.pack("<i", tid))

    def put(self, address: int, number: int) -> None:
        with (self.folder / "mem").open("r+b") as memory:
            memory.seek(address)
            memory.write(struct.pack("<q", number))

    def status_of(self, place: int) -> int:
        """Return the address of the status of the group in the node at this place of the table: 0 root, 1 right."""
        (node,) = struct.unpack("<Q", self.memory.bytes_at(self.address + NEWEST.statuses + 16, 8))
        if place:
            (node,) = struct.unpack("<Q", self.memory.bytes_at(node + 16, 8))
        return int(struct.unpack("<Q", self.memory.bytes_at(node + 40, 8))[0])

    def read(self, *, look: bool = True) -> ProgressCounter | Fault | None:
        self.counters.follow({self.process: self.owner})
        self.now += 1.0
        self.counters.read()
        if look:
            self.counters.look()
        return self.counters.read().get(self.process)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_collectives_of_the_main_thread_are_counted(rank: Rank) -> None:
    rank.read()
    assert rank.read() == ProgressCounter(total=0)
    first, last = rank.status_of(0), rank.status_of(1)
    rank.put(first, 40)
    before = rank.read()
    assert isinstance(before, ProgressCounter) and before.total > 0
    rank.put(last, 50)
    after = rank.read()
    assert isinstance(after, ProgressCounter) and after.total > before.total and after.restarts == 0


@pytest.mark.parametrize(
    ("name", "overwritten", "counts"),
    [("pt_autograd_0", {0}, True), ("heartbeat", {0}, False), ("trainer", set(), True)],
)
def test_collectives_of_another_thread_count_if_it_trains(
    tmp_path: Path, name: str, overwritten: set[int], counts: bool
) -> None:
    """Autograd trains, or the only thread of which a record is left, unless a group was used that has no record."""
    rank = Rank(tmp_path, overwritten=overwritten)
    rank.name_thread(5000, name)
    rank.use_thread(5000)
    rank.read()
    found = rank.read()
    assert isinstance(found, ProgressCounter) == counts
    if isinstance(found, Fault):
        assert found.reason == "NoCollectives"


def test_thread_that_has_ended_is_unknown_and_gives_no_counter_alone(rank: Rank) -> None:
    rank.use_thread(6000)
    rank.read()
    found = rank.read()
    assert isinstance(found, Fault) and found.reason == "NoCollectives"


def test_falling_number_is_a_restart(rank: Rank) -> None:
    rank.read()
    before = rank.read()
    rank.put(rank.status_of(0), 1)
    after = rank.read()
    assert isinstance(before, ProgressCounter) and isinstance(after, ProgressCounter)
    assert (after.total, after.restarts) == (before.total, before.restarts + 1)


@pytest.mark.parametrize("number", [10**18, -5])
def test_impossible_number_keeps_the_last_count_for_a_while(rank: Rank, number: int) -> None:
    rank.read()
    rank.put(rank.status_of(0), 30)
    before = rank.read()
    rank.put(rank.status_of(0), number)
    assert rank.read(look=False) == before
    rank.now += 60.0
    found = rank.read(look=False)
    assert isinstance(found, Fault) and found.reason == "ChangedWhileRead"


def test_other_process_with_the_same_pid_has_no_counter(rank: Rank) -> None:
    rank.read()
    assert rank.read() is not None
    other = ProcessId(pid=PID, start_ticks=10)
    rank.counters.follow({other: rank.owner})
    rank.counters.look()
    found = rank.counters.read().get(other)
    assert isinstance(found, Fault) and found.reason == "ProcessGone"


def test_process_without_torch_gives_its_reason(rank: Rank) -> None:
    (rank.folder / "maps").write_text("00400000-00500000 r-xp 00000000 08:01 3 /usr/bin/python3\n")
    found = rank.read()
    assert isinstance(found, Fault) and found.reason == "NoTorch"


def test_memory_that_does_not_respond_silences_only_its_owner(tmp_path: Path) -> None:
    """A FIFO without a writer blocks its reader, as memory in a file of a dead FUSE file system does."""
    hostile, also_its, others = Rank(tmp_path, 1, "uid 6"), Rank(tmp_path, 2, "uid 6"), Rank(tmp_path, 3, "uid 7")
    ranks = {rank.process: rank.owner for rank in (hostile, also_its, others)}
    now = 0.0
    counters = ProgressCounters(Recorders(tmp_path), tmp_path, lambda: now)
    counters.follow(ranks)
    counters.look()
    (hostile.folder / "mem").unlink()
    os.mkfifo(hostile.folder / "mem")
    counters.read()
    now += 1.0
    assert list(counters.read()) == [others.process]
    others.put(others.status_of(0), 100)
    assert isinstance(before := counters.read()[others.process], ProgressCounter) and before.total > 0
    now += 20.0
    reasons = {process.pid: fault.reason for process, fault in counters.read().items() if isinstance(fault, Fault)}
    assert reasons == {1: "NoAnswer", 2: "NoAnswer"}


def test_rank_without_a_turn_for_long_has_a_reason(rank: Rank) -> None:
    rank.counters.follow({rank.process: rank.owner})
    assert not rank.counters.read()
    rank.now += 20.0
    found = rank.counters.read()[rank.process]
    assert isinstance(found, Fault) and found.reason == "NoTurn"
