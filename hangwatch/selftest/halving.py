"""Pure: finds the one device without which a test passes, by halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hangwatch.model import Value

Passes = Callable[[Sequence[str]], bool]
"""Whether a test of these devices alone passes."""


class Halved(Value, frozen=True):
    """What was found: the devices that are suspect, one if `is_sure`, and how often was tried."""

    suspects: tuple[str, ...]
    is_sure: bool
    tries: int


def halve(devices: Sequence[str], passes: Passes) -> Halved:
    """Which of these devices, of which a test failed, makes it fail: with one fault in 1 + log2(devices) tries.

    Each half is tried; where it passes, the fault is sought in the other one. A device that is left alone is tried
    beside one that is known to be good. Not sure where no half fails by itself: then only both together do.
    """
    suspects, failed_alone, tries = tuple(devices), False, 0
    good: list[str] = []
    while len(suspects) > 1:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        company = good[:1] if len(half) == 1 else []
        tries += 1
        if passes((*company, *half)):
            good += half
            suspects, failed_alone = rest, False
        else:
            suspects, failed_alone = half, True
    if not suspects or failed_alone:
        return Halved(suspects=suspects, is_sure=bool(suspects), tries=tries)
    tries += 1
    if passes((*good[:1], *suspects)):
        return Halved(suspects=tuple(devices), is_sure=False, tries=tries)
    return Halved(suspects=suspects, is_sure=True, tries=tries)
