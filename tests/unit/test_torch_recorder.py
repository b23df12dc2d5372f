"""The flight recorder of every torch version, in synthetic memories: complete, wrapped, reset, torn, hostile."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.collectives.rank_records import merge_rounds
from hangwatch.limits import MOST_RANKS
from hangwatch.model.flight_records import (
    LATEST_UNIX_NS,
    Progression,
    RankRecords,
    find_progressions,
    list_ranks,
)
from hangwatch.probes.process.memory_image import UnreadableError
from hangwatch.probes.torch_recorder import decode, layouts, libraries, rows, search
from hangwatch.probes.torch_recorder.layouts import Layout
from hangwatch.probes.torch_recorder.search import MOST_BACKENDS, read_registry
from tests import fuzz_recorder, torch_layouts
from tests.recorder_memory import CREATED_UNIX_NS, FLOAT, Group, Memory, Operation, recorder, registry, text

ALL = layouts.candidates("")
NEWEST = ALL[-1]
PAIR = Group(id=3, name="7", description="tp", ranks=(0, 1, 6), counts=(9, -1, 8))


def read(memory: Memory, address: int, layout: Layout = NEWEST, library: str = "nccl") -> RankRecords:
    return decode.read(memory.read, address, layout, library, lambda: 1.0)  # type: ignore[arg-type]


def reason(memory: Memory, address: int, layout: Layout = NEWEST) -> str:
    with pytest.raises(UnreadableError) as why:
        read(memory, address, layout)
    return why.value.reason


def reduces(count: int, done: int = 0) -> list[Operation]:
    return [Operation(collective=n, op=n, is_completed=n <= done) for n in range(1, count + 1)]


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_records_of_every_version_are_read(layout: Layout) -> None:
    memory = Memory()
    gather = Operation(
        group=3,
        name="nccl:_all_gather_base",
        collective=9,
        op=12,
        inputs=((2, 3), ()),
        outputs=((2, 3),) * 6,
        is_retired=True,
        timeout_ms=1_800_000,
    )
    address = recorder(memory, layout, [*reduces(2, done=1), gather], [Group(), PAIR])
    found = read(memory, address, layout)
    assert [record.id for record in found.records] == [0, 1, 2]
    assert [record.state for record in found.records] == ["completed", "open", "open"]
    last = found.records[-1]
    assert (last.group_name, last.group_description, last.group_id) == ("7", "tp", 3)
    assert (last.operation, last.collective_seq, last.op_id) == ("nccl:_all_gather_base", 9, 12)
    assert last.input_sizes == ((2, 3), ()) and last.output_sizes == ((2, 3),) * 6
    assert last.output_dtypes == ("Float",) * 6 and last.timeout_ms == 1_800_000
    assert last.is_retired and not last.is_p2p and not last.is_started
    assert [(one.group_id, one.last_enqueued, one.last_completed) for one in found.groups] == [(0, 1, 0), (3, 9, 8)]
    assert [(one.name, one.ranks) for one in found.members] == [("0", ((0, 3, 1),)), ("7", ((0, 1, 1), (6, 6, 1)))]
    assert (found.next_id, found.oldest_id, found.is_wrapped, found.capacity) == (3, 0, False, 2000)


def test_records_of_group_with_rank_of_every_node_have_size_of_small_group() -> None:
    sizes = []
    for nodes in (8, 4096):
        memory, group = Memory(), Group(ranks=tuple(range(5, 8 * nodes, 8)))
        found = read(memory, recorder(memory, NEWEST, reduces(2), [group]))
        assert list_ranks(found.members[0].ranks) == [*group.ranks]
        sizes.append(len(msgspec.json.encode([found, merge_rounds([[found], [found]])])))
    assert sizes[1] < sizes[0] + 20


@given(st.sets(st.integers(0, 99)))
def test_progressions_hold_each_rank_once_in_order(ranks: set[int]) -> None:
    progressions = find_progressions(sorted(ranks))
    assert list_ranks(progressions) == sorted(ranks)
    assert len(progressions) <= len(ranks) // 2 + 1


@pytest.mark.parametrize("written", [[0], [0, 3, 0], [0, 3, -1], [-1, 3], [0, MOST_RANKS + 1], [0, 3, 1, 1]])
def test_impossible_progression_in_reply_is_refused(written: list[int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(written, Progression)
    assert list(msgspec.convert([0, 3], Progression).ranks) == [0, 1, 2, 3], "an incident without steps"
    assert list_ranks([Progression(MOST_RANKS, 0), *[Progression(0, 9)] * 9], most=80) == []


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_time_of_completion_is_read_if_it_is_possible(layout: Layout) -> None:
    second = CREATED_UNIX_NS + 10**9
    times = ((second, True), (second, False), (CREATED_UNIX_NS - 1, True), (LATEST_UNIX_NS, True), (-1, True))
    operations = [Operation(op=n, is_completed=flag, completed_unix_ns=time) for n, (time, flag) in enumerate(times)]
    memory = Memory()
    found = read(memory, recorder(memory, layout, operations), layout)
    assert [record.completed_unix_ns for record in found.records] == [second, 0, 0, 0, 0]


def test_gloo_records_complete_when_retired_and_have_no_members() -> None:
    memory = Memory()
    found = read(memory, recorder(memory, NEWEST, [Operation(is_retired=True), Operation(op=2)]), library="gloo")
    assert [record.state for record in found.records] == ["completed", "open"]
    assert found.members == ()


@pytest.mark.parametrize("layout", [ALL[0], NEWEST], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seen", [4, 5, 7, 8, 13])
def test_a_buffer_that_wrapped_keeps_its_newest(seen: int, layout: Layout) -> None:
    memory = Memory()
    found = read(memory, recorder(memory, layout, reduces(seen), capacity=4), layout)
    assert [record.collective_seq for record in found.records] == list(range(seen - 3, seen + 1))
    assert (found.oldest_id, found.is_wrapped) == (seen - 4, seen > 4)


@pytest.mark.parametrize(("lead", "count"), [(3, 2), (3, 0), (6, 3), (2, 9)])
def test_records_of_an_older_epoch_are_dropped(lead: int, count: int) -> None:
    memory = Memory()
    found = read(memory, recorder(memory, NEWEST, reduces(count), capacity=4, epoch=1, lead=lead))
    assert [record.collective_seq for record in found.records] == list(range(max(1, count - 3), count + 1))
    assert found.reset_epoch == 1


def test_parts_of_a_coalesced_batch_are_marked() -> None:
    memory = Memory()
    parts = [Operation(name="nccl:send 0->1", p2p=4, collective=2, op=n, is_p2p=True) for n in (7, 8)]
    closing = Operation(name="nccl:coalesced", p2p=4, collective=2, op=8, is_p2p=True)
    other = Operation(name="nccl:send 0->1", p2p=5, collective=2, op=9, is_p2p=True)
    found = read(memory, recorder(memory, NEWEST, [*parts, closing, Operation(collective=2), other]))
    assert [record.is_coalesced_part for record in found.records] == [True, True, False, False, False]


def test_recorder_that_is_off_is_a_fault() -> None:
    memory = Memory()
    assert reason(memory, recorder(memory, NEWEST, [], capacity=0)) == "RecorderOff"


def test_a_layout_of_another_version_does_not_fit() -> None:
    for layout in ALL:
        memory = Memory()
        address = recorder(memory, layout, reduces(40), [Group(), PAIR])
        others = [other for other in ALL if other.record_bytes != layout.record_bytes]
        assert [reason(memory, address, other) for other in others] == ["UnknownLayout"] * len(others)


def test_records_touched_by_the_writer_are_dropped() -> None:
    memory, later = Memory(), Memory()
    address = recorder(memory, NEWEST, reduces(6), capacity=4)
    assert recorder(later, NEWEST, reduces(7), capacity=4) == address
    turns: list[int] = []

    def changing(places: Sequence[tuple[int, int]]) -> list[bytes]:
        turns.append(1)
        return (memory if len(turns) <= 1 else later).read(places)

    found = decode.read(changing, address, NEWEST, "nccl", lambda: 1.0)
    assert [record.collective_seq for record in found.records] == [5, 6], "3 was overwritten, 4 may be under way"
    assert found.next_id == 6


def test_buffer_that_moves_each_time_is_a_fault() -> None:
    memory = Memory()
    address = recorder(memory, NEWEST, reduces(6), capacity=40)
    moved, begin, size = memory.copy(), memory.range[1], NEWEST.record_bytes * 6
    moved.put(address + NEWEST.entries, "QQQ", begin, begin + size, begin + size)
    looks: list[int] = []

    def changing(places: Sequence[tuple[int, int]]) -> list[bytes]:
        looks.extend(1 for place, _ in places if place == address)
        return (memory if len(looks) % 2 else moved).read(places)

    with pytest.raises(UnreadableError) as why:
        decode.read(changing, address, NEWEST, "nccl", lambda: 1.0)
    assert why.value.reason == "ChangedWhileRead"
    assert len(looks) == 2 * decode.TRIES


HOSTILE = {
    "a billion records": (NEWEST.entries + 8, "Q", 0x7F0000000000 + NEWEST.record_bytes * 10**9),
    "a billion counted": (NEWEST.next_id, "Q", 10**9),
    "a capacity of zero": (NEWEST.capacity, "Q", 0),
    "a buffer at zero": (NEWEST.entries, "QQQ", 0, NEWEST.record_bytes * 4, NEWEST.record_bytes * 4),
    "a buffer in the kernel": (NEWEST.entries, "QQQ", 1 << 63, (1 << 63) + NEWEST.record_bytes * 4, 1 << 63),
    "a billion groups": (NEWEST.statuses + 40, "Q", 10**9),
    "a map with a cycle": (NEWEST.statuses + 16, "Q", 0x7F0000000000),
    "a flag of seven": (NEWEST.enabled, "B", 7),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_counters_give_a_fault(what: str) -> None:
    memory = Memory()
    address = recorder(memory, NEWEST, reduces(4), capacity=4)
    offset, code, *values = HOSTILE[what]
    memory.put(address + offset, code, *values)
    assert reason(memory, address) in ("UnknownLayout", "TooLarge")


def test_hostile_records_give_a_fault() -> None:
    for offset, code, value in (
        (NEWEST.group_names + 8, "Q", 10**9),
        (NEWEST.operation, "Q", 1),
        (NEWEST.sizes + 8, "II", 10**9),
        (NEWEST.input_dims + 8, "I", 4),
        (NEWEST.input_dtypes + 8, "Q", 1 << 46),
        (NEWEST.created, "q", -1),
        (NEWEST.group_id, "Q", 5),
        (NEWEST.retired, "B", 2),
        (NEWEST.record_id, "Q", 4),
    ):
        memory = Memory()
        address = recorder(memory, NEWEST, reduces(4))
        entry = int.from_bytes(memory.bytes_at(address + NEWEST.entries, 8), "little")
        values = (value, 10**9) if code == "II" else (value,)
        memory.put(entry + offset, code, *values)
        assert reason(memory, address) in ("UnknownLayout", "TooLarge"), offset


def test_operation_with_too_many_tensors_has_no_shapes() -> None:
    memory = Memory()
    many = Operation(outputs=((4,),) * 2000)
    found = read(memory, recorder(memory, NEWEST, [many, Operation(op=2)]))
    assert found.records[0].output_sizes == () and found.records[1].output_sizes == ((4,),)


def test_large_buffer_yields_its_newest_records() -> None:
    memory = Memory()
    count = decode.MOST_RECORDS + 100
    found = read(memory, recorder(memory, NEWEST, reduces(count), capacity=10_000))
    assert len(found.records) == decode.MOST_RECORDS
    assert (found.oldest_id, found.is_wrapped) == (100, True)


def test_short_read_keeps_open_and_newest_records_of_each_group() -> None:
    memory = Memory()
    rare = Operation(group=3, collective=5, op=5, is_completed=True)
    stuck = [Operation(group=3, collective=6, op=6), *reduces(40, done=40)]
    address = recorder(memory, NEWEST, [*reduces(9, done=9), rare, *stuck], [Group(), PAIR])
    whole = read(memory, address)
    short = decode.read(memory.read, address, NEWEST, "nccl", lambda: 1.0, newest=2)
    assert [record.id for record in short.records] == [0, 9, 10, 49, 50]
    assert short.records == tuple(record for record in whole.records if record.id in (0, 9, 10, 49, 50))
    assert (short.next_id, short.oldest_id, short.groups) == (whole.next_id, whole.oldest_id, whole.groups)


def test_short_read_marks_parts_of_a_batch() -> None:
    memory = Memory()
    parts = [Operation(name="nccl:send 0->1", p2p=4, op=n, is_p2p=True) for n in (7, 8)]
    closing = Operation(name="nccl:coalesced", p2p=4, op=8, is_p2p=True, is_completed=True)
    address = recorder(memory, NEWEST, [*reduces(3, done=3), *parts, closing, *reduces(9, done=9)])
    short = decode.read(memory.read, address, NEWEST, "nccl", lambda: 1.0, newest=1)
    assert [(record.id, record.is_coalesced_part) for record in short.records] == [
        (0, False),
        (3, True),
        (4, True),
        (5, False),
        (14, False),
    ]


def test_names_are_printable_and_bounded() -> None:
    memory = Memory()
    hostile = Group(name="\x1b[2J", description="x" * 4000)
    (record,) = read(memory, recorder(memory, NEWEST, reduces(1), [hostile])).records
    assert record.group_name == "\\x1b[2J"
    assert len(record.group_description) == rows.MOST_NAME


def test_a_recorder_is_found_by_its_shape() -> None:
    memory = Memory()
    data = memory.new(4096)
    memory.new(64)
    address = recorder(memory, NEWEST, reduces(4), [Group(), PAIR])
    memory.put(data + 808, "QQ", 1, address)
    memory.put(data + 8, "Q", address + 16)
    ranges = [(data, data + 4096)]
    assert search.search(memory.read, ranges, [memory.range], [NEWEST]) == [(address, NEWEST)]


def test_hook_recorder_completes_by_retirement_and_has_members() -> None:
    memory = Memory()
    operations = [Operation(name="nccl2:all_reduce", is_retired=True), Operation(name="nccl2:all_reduce", op=2)]
    found = read(memory, recorder(memory, NEWEST, operations), library="nccl2")
    assert [record.state for record in found.records] == ["completed", "open"]
    assert [group.ranks for group in found.members] == [((0, 3, 1),)]


MAPS = b"""\
555555554000-555555556000 r--p 00000000 fe:00 11 /usr/bin/python3
7f0000000000-7f0000100000 r-xp 00000000 fe:00 42 /a b/torch/lib/libtorch_cpu.so
7f0000100000-7f0000101000 r--p 00100000 fe:00 42 /a b/torch/lib/libtorch_cpu.so
7f0000101000-7f0000102000 rw-p 00101000 fe:00 42 /a b/torch/lib/libtorch_cpu.so
7f0000102000-7f0000108000 rw-p 00000000 00:00 0
7f0000200000-7f0000208000 rw-p 00000000 00:00 0
7f0000300000-7f0000301000 r--p 00000000 fe:00 43 /usr/lib/libtorch_cuda.so.2.6 (deleted)
7f0000400000-7f0000401000 r--p 00000000 fe:00 44 /usr/lib/libtorch_cuda_linalg.so
"""


def test_libraries_are_found_in_mappings() -> None:
    found = libraries.parse_maps(MAPS)
    cpu, cuda = found.libraries
    assert (cpu.library, cpu.path, cpu.device, cpu.inode) == ("gloo", "/a b/torch/lib/libtorch_cpu.so", "fe:00", 42)
    assert cpu.data == ((0x7F0000101000, 0x7F0000102000), (0x7F0000102000, 0x7F0000108000))
    assert (cuda.library, cuda.data) == ("nccl", ())
    assert len(found.writable) == 3


@pytest.mark.parametrize(
    "maps",
    [
        b"",
        b"-",
        b"a-b\n",
        b"1-2 rw-p x y z\n",
        b"\xff" * 200,
        b"7f-80 rw-p 0 0 0 /libtorch_cpu.so\n" * 9,
        b"7f-80 rw-p 0 \xe1 0 /libtorch_cpu.so",
    ],
)
def test_forged_mappings_are_read_without_harm(maps: bytes) -> None:
    assert len(libraries.parse_maps(maps).libraries) <= 1


def test_dtypes_have_the_names_of_torchs_dump() -> None:
    assert layouts.dtypes()[FLOAT] == "Float" and layouts.dtypes()[15] == "BFloat16"


def test_mutated_memories_give_records_or_a_fault() -> None:
    answers = fuzz_recorder.fuzz(1500, seed=20)
    assert not [answer for answer in answers if answer.startswith(("CRASH", "NONSENSE"))]
    assert answers["records"] > 100 and answers["UnknownLayout"] > 100, "both are met"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, to ask the headers of torch")
@pytest.mark.torch
@pytest.mark.machines
@pytest.mark.timeout(600)
def test_layout_table_matches_the_headers_of_the_installed_torch() -> None:
    import torch

    installed = Path(torch.__file__).parent
    with torch_layouts.headers(str(installed)) as (version, include):
        told = torch_layouts.layout(include)
        names = torch_layouts.dtypes(include)
    (layout,) = layouts.candidates(version)
    assert version in layout.versions
    assert {field: getattr(layout, field) for field in told} == told
    assert layouts.dtypes()[: len(names)] == tuple(names)
    described = torch_layouts.describe_known(told, installed / "lib")
    assert described.startswith(f"layout of {layout.name}; libtorch_cpu.so: pointer")
    with pytest.raises(torch_layouts.CannotTellError, match="its layout is new"):
        torch_layouts.describe_known(told | {"entries": 9}, installed / "lib")


BACKENDS = {"nccl2": 0x7F0000100000, "gloo": 0x7F0000100040, "a_backend_with_a_long_name": 0x7F0000100080}
MOST_READS = 2 * MOST_BACKENDS + 3


def read_backends(memory: Memory, address: int) -> tuple[dict[str, int] | str, int]:
    """Return the recorders or the reason of the fault, and the number of reads."""
    reads = 0

    def count(places: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal reads
        reads += 1
        return memory.read(places)

    try:
        return read_registry(count, address), reads
    except UnreadableError as error:
        return error.reason, reads


def test_each_backend_has_the_address_of_its_recorder() -> None:
    memory = Memory()
    assert read_registry(memory.read, registry(memory, BACKENDS)[0]) == BACKENDS


def test_a_registry_without_backends_has_no_recorder() -> None:
    memory = Memory()
    assert read_registry(memory.read, registry(memory, {})[0]) == {}
    assert read_registry(memory.read, memory.new(56)) == {}, "before its first use"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda memory, address, nodes: memory.put(nodes[-1], "Q", nodes[0]), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[0], "Q", nodes[0]), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[0], "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 1 << 40), "TooLarge"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 10**9), "TooLarge"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 1), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 2), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", MOST_BACKENDS), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 16, "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 16, "Q", 8), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address, "QQ", 0, 0), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 8, "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[1] + 40, "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: text(memory, nodes[1] + 8, "nccl2"), "UnknownLayout"),
        (lambda memory, address, nodes: text(memory, nodes[1] + 8, "\x1b[31m"), "UnknownLayout"),
    ],
    ids=[
        *("cycle", "own node", "cut", "huge count", "a billion", "one of three", "two of three", "more"),
        *("no first node", "a wild pointer", "no table", "no buckets", "no recorder", "name twice", "escape"),
    ],
)
def test_damaged_registry_is_refused(damage: Callable[[Memory, int, list[int]], None], reason: str) -> None:
    memory = Memory()
    address, nodes = registry(memory, BACKENDS)
    damage(memory, address, nodes)
    answer, reads = read_backends(memory, address)
    assert answer == reason and reads <= MOST_READS


def test_registry_that_changes_while_it_is_read_is_refused() -> None:
    memory = Memory()
    address, _ = registry(memory, BACKENDS)
    reads = 0

    def grow(places: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal reads
        reads += 1
        if reads == 3:
            memory.put(address + 24, "Q", len(BACKENDS) + 1)
        return memory.read(places)

    with pytest.raises(UnreadableError) as refused:
        read_registry(grow, address)
    assert refused.value.reason == "ChangedWhileRead"


def replace_a_word(memory: Memory, address: int, chance: random.Random) -> None:
    first, end = memory.range
    place = first + 8 * chance.randrange((end - first) // 8)
    memory.put(place, "Q", chance.choice((0, 1, 8, first, address, place, 1 << 40, (1 << 64) - 1)))


def flip_bytes(memory: Memory, address: int, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        memory.flip(chance.randrange(*memory.range), chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256))))


@pytest.mark.parametrize("change", [replace_a_word, flip_bytes])
def test_random_changes_give_few_recorders_or_a_fault(change: Callable[[Memory, int, random.Random], None]) -> None:
    seed, chance, answers = Memory(), random.Random(47), set()
    address, _ = registry(seed, BACKENDS)
    for _ in range(3000):
        memory = seed.copy()
        change(memory, address, chance)
        answer, reads = read_backends(memory, address)
        assert reads <= MOST_READS
        assert isinstance(answer, str) or len(answer) <= MOST_BACKENDS
        answers.add(answer if isinstance(answer, str) else "recorders")
    assert answers == {"recorders", "UnknownLayout", "TooLarge"}
