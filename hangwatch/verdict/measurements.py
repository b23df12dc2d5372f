"""Comparison of the measurements of some ranks with those of all others. Pure."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from hangwatch.model import Group, Member, median

_POWER_RATIO = 0.9
UTILIZATION_GAP = 0.5
CPU_GAP = 0.5
FEWEST_TO_STAND_OUT = 3
# Calculated: one block of a kernel uses one SM of 132 (H100) or 148 (B200). NCCL's kernels also use memory bandwidth.
_SM_OF_NO_KERNEL = 0.001
SM_OF_A_KERNEL = 0.005

Read = Callable[[Member], float | None]
GpuNumber = Literal["power", "utilization", "kernel"]

POWER: Read = attrgetter("gpu.power_watts")
UTILIZATION: Read = attrgetter("gpu.utilization_ratio")
CPU: Read = attrgetter("usage.cpu_ratio")


class Compared(NamedTuple):
    """The values of one measurement: for the suspects and for all other ranks. Ranks without a value are left out."""

    suspects: list[float]
    others: list[float]

    @property
    def is_measured(self) -> bool:
        """True if at least one suspect and one other rank have a value."""
        return bool(self.suspects and self.others)

    @property
    def draws_less(self) -> bool:
        """True if every suspect draws less than nine tenths of the power (watts) of every other rank."""
        return self.is_measured and max(self.suspects) < _POWER_RATIO * min(self.others)

    def is_lower(self, gap: float) -> bool:
        """True if the value of every suspect is lower than that of every other rank by at least `gap`."""
        return self.is_measured and max(self.suspects) <= min(self.others) - gap

    def is_apart(self, gap: float) -> bool:
        """True if the median of the suspects and the median of the other ranks differ by at least `gap`."""
        return self.is_measured and abs(median(self.suspects) - median(self.others)) >= gap


def compare(members: Iterable[Member], others: Iterable[Member], read: Read) -> Compared:
    """Return the values that `read` returns for `members` and for `others`."""
    return Compared(values(members, read), values(others, read))


def is_supported(members: Sequence[Member], others: Sequence[Group]) -> bool:
    """True if the power, GPU utilization or CPU use of these ranks differs from that of the other ranks."""
    rest = [member for group in others for member in group.members]
    return (
        compare(members, rest, POWER).draws_less
        or compare(members, rest, UTILIZATION).is_apart(UTILIZATION_GAP)
        or compare(members, rest, CPU).is_apart(CPU_GAP)
    )


def machine_says_the_same(members: Sequence[Member], others: Sequence[Group]) -> bool:
    """True if measurements separate these ranks from all others, as their stacks do. One of these must be true:

    * Their GPUs draw less power than any other and are idle, while the others are busy. Low power alone is not enough.
    * Their processes use no CPU, while the processes of the other ranks spin.
    * They wait for a peer outside the job, or in a call on a file or pipe that no other rank has open.
    """
    rest = [member for group in others for member in group.members]
    if all(member.waits.awaited is not None or member.waits.stuck_on is not None for member in members):
        return True
    is_idle = compare(members, rest, UTILIZATION).is_lower(UTILIZATION_GAP)
    draws_less = compare(members, rest, POWER).draws_less
    return (draws_less and is_idle) or compare(members, rest, CPU).is_lower(CPU_GAP)


class OddGpu(NamedTuple):
    """A rank with a GPU that differs from the GPUs of all other ranks in one number.

    `number` is "power" (watts), "utilization" (ratio) or "kernel" (ratio of SMs with a kernel). `value` is the number
    of this rank's GPU; `others` are the numbers of the other GPUs.
    """

    member: Member
    number: GpuNumber
    value: float
    others: list[float]


def find_odd_gpu(members: Sequence[Member]) -> OddGpu | None:
    """Return the only rank with a GPU that differs from all others. None if there is no such rank, or more than one.

    Such a GPU draws less than nine tenths of the power of any other, is idle while all others are busy, or runs no
    kernel while all others run one. The number must be known for all ranks, and for at least three.
    """
    odd: dict[object, OddGpu] = {}
    for number, read, differs in _ODD:
        measured = values(members, read)
        if len(measured) < max(FEWEST_TO_STAND_OUT, len(members)):
            continue
        place = measured.index(min(measured))
        value, others = measured.pop(place), measured
        if differs(value, min(others)):
            odd[members[place].id] = OddGpu(members[place], number, value, others)
    return next(iter(odd.values())) if len(odd) == 1 else None


_ODD: tuple[tuple[GpuNumber, Read, Callable[[float, float], bool]], ...] = (
    ("power", POWER, lambda value, lowest: value < _POWER_RATIO * lowest),
    ("utilization", UTILIZATION, lambda value, lowest: value <= lowest - UTILIZATION_GAP),
    (
        "kernel",
        lambda member: member.gpu.use.sm_ratio if member.gpu.use else None,
        lambda value, lowest: value < _SM_OF_NO_KERNEL and lowest >= SM_OF_A_KERNEL,
    ),
)
"""The numbers of a GPU, and how the lowest differs from the lowest of all others."""


def values(members: Iterable[Member], read: Read) -> list[float]:
    """Return the value of each member. Members without a value are left out."""
    return [value for value in map(read, members) if value is not None]
