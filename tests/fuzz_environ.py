"""Fuzz the reader of live environments: changed memory must be read within limits, or refused.

usage: python -m tests.fuzz_environ [--count 100000] [--seed 1]
"""

import random
import time
from collections.abc import Sequence

from hangwatch.probes.process import live_environ
from hangwatch.probes.process.environment import KEPT_CHARACTERS
from hangwatch.probes.process.live_environ import Place
from hangwatch.probes.process.memory_image import MOST_BYTES, Image, UnreadableError
from tests.environ_memory import PAGE_BYTES, EnvironMemory, make
from tests.soak import number_options

WANTED = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR"})
NUMBERS = (0, 1, 7, 8, 255, 4095, 4096, 2**31, 2**32 - 1, 2**47, 2**48, 2**63, 2**64 - 1)
MOST_CPU_SECONDS = 0.05
MOST_QUESTIONS = 64


def changed(memory: EnvironMemory, value: int, seed: int) -> EnvironMemory:
    """Return the memory with one to four words replaced: by `value`, by an address in the memory, or by a limit."""
    choice = random.Random(seed)
    first, end = memory.memory.range
    targets = (memory.symbol, memory.array, memory.array + 8, memory.start + 32, memory.start + 120)
    for _ in range(choice.randint(1, 4)):
        somewhere = choice.randrange(first + PAGE_BYTES, end - 8)
        at = choice.choice((*targets, somewhere & ~7, somewhere))
        new = choice.choice((value, choice.randrange(first, end), choice.choice(NUMBERS)))
        memory.memory.put(at, "Q", new)
    return memory


def read_all(memory: EnvironMemory) -> None:
    """Find the symbol and read the environment. Raises UnreadableError, or AssertionError if a limit is exceeded."""
    questions = count = 0

    def read(places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        nonlocal questions, count
        questions, count = questions + 1, count + sum(size for _, size in places)
        assert questions <= MOST_QUESTIONS and count <= 2 * MOST_BYTES, (questions, count)
        return memory.memory.read(places)

    page = memory.memory.bytes_at(memory.start, PAGE_BYTES)
    offset = live_environ.find_symbol(Image(read), memory.start, page)
    for symbol in (memory.symbol, memory.symbol if offset is None else memory.start + offset):
        answer = live_environ.read_environ(read, Place(symbol), WANTED)
        assert answer[1].variables.keys() <= WANTED
        assert sum(map(len, answer[1].variables.values())) <= KEPT_CHARACTERS


def main() -> None:
    chosen = number_options(__doc__, count=100_000, seed=1)
    choice, slowest, refused = random.Random(chosen.seed), 0.0, 0
    for number in range(chosen.count):
        memory = make([*(b"V%d=x" % index for index in range(choice.randint(0, 40))), b"RANK=3"])
        memory = changed(memory, choice.getrandbits(64), chosen.seed + number)
        began = time.process_time()
        try:
            read_all(memory)
        except UnreadableError:
            refused += 1
        slowest = max(slowest, time.process_time() - began)
    print(f"{chosen.count} memories: {refused} refused, the slowest took {slowest * 1e3:.1f} ms of CPU")
    assert slowest < MOST_CPU_SECONDS


if __name__ == "__main__":
    main()
