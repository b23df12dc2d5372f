"""The registry of recorders in damaged memory: a few reads, then a fault."""

import random
from collections.abc import Callable, Sequence

import pytest

from hangwatch.probes.process.memory_image import UnreadableError
from hangwatch.probes.torch_recorder.backend_recorders import MOST_BACKENDS, read_registry
from tests.recorder_memory import Memory, text

NAMES = ("nccl2", "gloo", "a_backend_with_a_long_name")
MOST_READS = 2 * MOST_BACKENDS + 3


def registry(memory: Memory, names: Sequence[str] = NAMES) -> tuple[int, list[int]]:
    """Write a registry as libstdc++ does. Return its address, and those of its nodes."""
    address, nodes = memory.new(56), [memory.new(56) for _ in names]
    memory.put(address, "QQQQ", memory.new(8 * 13), 13, nodes[0], len(names))
    for number, (node, name) in enumerate(zip(nodes, names, strict=True)):
        memory.put(node, "Q", nodes[number + 1] if number + 1 < len(nodes) else 0)
        text(memory, node + 8, name)
        memory.put(node + 40, "QQ", 0x7F0000100000 + 64 * number, number)
    return address, nodes


def read(memory: Memory, address: int) -> tuple[dict[str, int] | str, int]:
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
    address, _ = registry(memory)
    assert read(memory, address)[0] == {name: 0x7F0000100000 + 64 * number for number, name in enumerate(NAMES)}
    empty = memory.new(56)
    memory.put(empty, "QQQQ", empty + 48, 1, 0, 0)
    assert read(memory, empty)[0] == {}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda memory, address, nodes: memory.put(nodes[-1], "Q", nodes[0]), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[0], "Q", nodes[0]), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[0], "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 1 << 40), "TooLarge"),
        (lambda memory, address, nodes: memory.put(address + 24, "Q", 2), "UnknownLayout"),
        (lambda memory, address, nodes: memory.put(nodes[1] + 40, "Q", 0), "UnknownLayout"),
        (lambda memory, address, nodes: text(memory, nodes[1] + 8, "nccl2"), "UnknownLayout"),
        (lambda memory, address, nodes: text(memory, nodes[1] + 8, "\x1b[31m"), "UnknownLayout"),
    ],
    ids=["cycle", "own node", "cut", "huge count", "small count", "no recorder", "name twice", "escape"],
)
def test_damaged_registry_is_refused(damage: Callable[[Memory, int, list[int]], None], reason: str) -> None:
    memory = Memory()
    address, nodes = registry(memory)
    damage(memory, address, nodes)
    answer, reads = read(memory, address)
    assert answer == reason and reads <= MOST_READS


def test_registry_that_changes_while_it_is_read_is_refused() -> None:
    memory = Memory()
    address, _ = registry(memory)
    reads = 0

    def grow(places: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal reads
        reads += 1
        if reads == 3:
            memory.put(address + 24, "Q", len(NAMES) + 1)
        return memory.read(places)

    with pytest.raises(UnreadableError) as refused:
        read_registry(grow, address)
    assert refused.value.reason == "ChangedWhileRead"


def test_random_changes_give_few_recorders_or_a_fault() -> None:
    seed, chance, answers = Memory(), random.Random(47), set()
    address, _ = registry(seed)
    first, end = seed.range
    for _ in range(3000):
        memory = seed.copy()
        for _ in range(chance.randint(1, 4)):
            memory.flip(chance.randrange(first, end), chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256))))
        answer, reads = read(memory, address)
        assert reads <= MOST_READS
        answers.add(answer if isinstance(answer, str) else "recorders")
    assert {"recorders", "UnknownLayout", "TooLarge"} <= answers
