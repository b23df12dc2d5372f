"""Growth of resources over the samples of a long run."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

GROWTH_RATIO = 1.05
Sample = TypeVar("Sample", bound=NamedTuple)


def find_growth(samples: Sequence[Sample], parts: int) -> list[str]:
    """Print each number in the second and in the last of equal parts of a run. Return a line for each one that grows.

    A number grows if its median in the last part is more than 5 % and more than 1 above that in the second part.
    """
    length = len(samples) // parts
    second, last = samples[length : 2 * length], samples[-length:]
    growing = []
    for index, name in enumerate(samples[0]._fields):
        before, after = (statistics.median(sample[index] for sample in part) for part in (second, last))
        print(f"{name}: {before:.1f} in part 2 of {parts}, {after:.1f} in the last")
        if after > max(before * GROWTH_RATIO, before + 1):
            growing.append(f"{name} grows from {before:.1f} to {after:.1f}")
    return growing
