"""Fuzz the reader of flight recorders: changed memory must not crash it, and must not give impossible records.

usage: python -m tests.fuzz_recorder [--count 1000000] [--seed 1] [--processes 2]

Each memory holds a recorder of some version (`recorder_memory`). The fuzzer changes one or several bytes, words,
pointers or counts in it, or cuts parts off. The reader must return records or raise UnreadableError, within its
bounds. Records that no recorder can hold are reported, see `find_nonsense`. A changed number that is still possible
cannot be detected.
"""

import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from hangwatch.limits import MOST_RANKS
from hangwatch.model.flight_records import EARLIEST_UNIX_NS, LATEST_UNIX_NS, RankRecords, list_ranks
from hangwatch.probes.process import memory_image
from hangwatch.probes.process.memory_image import UnreadableError
from hangwatch.probes.torch_recorder import decode, layouts, rows
from hangwatch.probes.torch_recorder.layouts import Layout
from tests.recorder_memory import Group, Memory, Operation, recorder
from tests.soak import number_options

GROUPS = (Group(), Group(id=3, name="7", description="tensor_parallel_group", ranks=(0, 1, 6), counts=(9, -1, 8)))
SMALL = (0, 1, 2, 7, 8, 15, 16, 255, 4096, 10**6, 10**9)
NUMBERS = (*SMALL, 2**31 - 1, 2**31, 2**32, 2**47, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


class Seed:
    """An intact memory, and the addresses of its recorder, its records and its other data."""

    def __init__(self, layout: Layout, records: int, capacity: int, epoch: int = 0) -> None:
        self.layout, self.memory = layout, Memory()
        operations = [
            Operation(
                group=3 * (number % 2),
                name="nccl:all_reduce" if number % 3 else "nccl:_reduce_scatter_base",
                collective=number,
                op=number,
                is_completed=number < records - 2,
                outputs=((4, 2),) * (1 + number % 6),
            )
            for number in range(records)
        ]
        self.address = recorder(self.memory, layout, operations, GROUPS, capacity=capacity, epoch=epoch, lead=2 * epoch)


def seeds() -> list[Seed]:
    """Return memories of every layout: a few records, a buffer that wrapped, a second epoch, an empty recorder."""
    return [
        Seed(layout, records, capacity, epoch)
        for layout in layouts.candidates("")
        for records, capacity, epoch in (
            (6, 100, 0),
            (11, 4, 0),
            (0, 100, 0),
            *(((3, 4, 1),) if layout.record_epoch >= 0 else ()),
        )
    ]


def mutate(seed: Seed, chance: random.Random) -> Memory:
    """Return a changed copy of the memory; half of the changes are in the recorder object, which points to the rest."""
    memory = seed.memory.copy()
    first, end = memory.range
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        if chance.random() < 0.5:
            place = seed.address + chance.randrange(seed.layout.recorder_bytes)
        else:
            place = chance.randrange(first, end - 8)
        kind = chance.randrange(5)
        if kind == 0:
            memory.flip(place, chance.randrange(256))
        elif kind == 1:
            memory.flip(place, memory.bytes_at(place, 1)[0] ^ 1 << chance.randrange(8))
        else:
            word = place & ~7 if place & ~7 >= first else first
            value = (
                chance.choice(NUMBERS)
                if kind == 2
                else chance.randrange(first, end)
                if kind == 3
                else (struct.unpack("<Q", memory.bytes_at(word, 8))[0] + chance.choice((-8, -1, 1, 8, 512, -512)))
                % 2**64
            )
            memory.put(word, "Q", value)
    return memory


class BoundedMemory:
    """A reader of a memory. It counts the requested bytes; addresses from `cut` on return no data."""

    def __init__(self, memory: Memory, cut: int | None) -> None:
        self._memory, self._cut, self.bytes = memory, cut, 0

    def __call__(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        self.bytes += sum(size for _, size in places)
        return [
            self._memory.bytes_at(address, size) if self._cut is None or address < self._cut else b""
            for address, size in places
        ]


def find_nonsense(found_records: RankRecords, newest: int | None = None) -> str:
    """Return the names of the rules that these records break. The result is empty if a recorder can hold them."""
    records, groups = found_records.records, {group.group_id for group in found_records.groups}
    ids, all_ids = [record.id for record in records], range(found_records.oldest_id, found_records.next_id)
    rules = {
        "ids without a gap": ids == list(all_ids) if newest is None else ids == sorted({*ids} & {*all_ids}),
        "no more than the buffer holds": len(records) <= min(found_records.capacity, decode.MOST_RECORDS),
        "one epoch": all(record.reset_epoch == found_records.reset_epoch for record in records),
        "groups that are known": all(record.group_id in groups for record in records),
        "times of our days": all(EARLIEST_UNIX_NS < record.created_unix_ns < LATEST_UNIX_NS for record in records),
        "numbers in range": all(
            0 <= number < 1 << 53
            for record in records
            for number in (record.collective_seq, record.p2p_seq, record.op_id)
        ),
        "time-outs": all(record.timeout_ms >= -1 for record in records),
        "counts": all(
            -1 <= count < 1 << 53
            for group in found_records.groups
            for count in (group.last_enqueued, group.last_started, group.last_completed)
        ),
        "names": all(
            len(name) <= rows.MOST_NAME and name.isprintable()
            for record in records
            for name in (record.group_name, record.group_description, record.operation, record.thread_name)
        ),
        "a type for each tensor": all(
            (len(record.input_sizes), len(record.output_sizes)) == (len(record.input_dtypes), len(record.output_dtypes))
            for record in records
        ),
        "sizes": all(
            0 <= size < 1 << 53
            for record in records
            for shape in (*record.input_sizes, *record.output_sizes)
            for size in shape
        ),
        "members": all(0 <= rank < MOST_RANKS for group in found_records.members for rank in list_ranks(group.ranks)),
    }
    return ", ".join(name for name, holds in rules.items() if not holds)


def fuzz(count: int, seed: int) -> Counter[str]:
    """Read `count` changed memories. Return the outcomes. Findings are "NONSENSE ..." and "CRASH ..."."""
    chance, all_seeds, answers = random.Random(seed), seeds(), Counter[str]()
    for number in range(count):
        whole = chance.choice(all_seeds)
        memory = mutate(whole, chance)
        cut = chance.randrange(*memory.range) if chance.random() < 0.05 else None
        reader = BoundedMemory(memory, cut)
        layout = whole.layout if chance.random() < 0.9 else chance.choice(all_seeds).layout
        newest, library = chance.choice((None, None, 0, 2)), chance.choice(("nccl", "gloo"))
        try:
            found = decode.read(  # this memory does not change, so every try reads the same
                reader, whole.address, layout, library, time.time, newest=newest, tries=1
            )
            wrong = find_nonsense(found, newest)
            answers[f"NONSENSE {wrong} (seed {seed}, memory {number})" if wrong else "records"] += 1
        except UnreadableError as error:
            answers[error.reason] += 1
        except Exception as error:  # any other exception is a finding
            answers[f"CRASH {type(error).__name__}: {error} (seed {seed}, memory {number})"] += 1
        if reader.bytes > memory_image.MOST_BYTES + (1 << 20):
            answers[f"NONSENSE {reader.bytes:,} bytes read (seed {seed}, memory {number})"] += 1
    return answers


def main() -> int:
    chosen = number_options(__doc__, count=1_000_000, seed=1, processes=2)
    each = -(-chosen.count // (chosen.processes * 50))
    with ProcessPoolExecutor(chosen.processes) as pool:
        parts = pool.map(fuzz, [each] * chosen.processes * 50, range(chosen.seed, chosen.seed + chosen.processes * 50))
        answers = sum(parts, Counter[str]())
    for answer, times in answers.most_common(40):
        print(f"{times:9,} {answer}")
    findings = sum(times for answer, times in answers.items() if answer.startswith(("NONSENSE", "CRASH")))
    print(f"{answers.total():,} memories, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
