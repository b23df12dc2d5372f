"""Bisection to find the device that makes a test fail. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hangwatch.model import Value

Passes = Callable[[Sequence[str]], bool]
"""A function that runs a test with only these devices and returns true if the test passes."""


class Halved(Value, frozen=True):
    """The suspect devices, and the number of tests. `is_sure`: the only suspect makes the test fail."""

    suspects: tuple[str, ...]
    is_sure: bool
    tries: int


def halve(devices: Sequence[str], passes: Passes) -> Halved:
    """Find the device that makes a test of all these devices fail, in 1 + log2(devices) tests for one fault.

    If the first half passes, the search continues in the other half. A single device is tested together with a
    device that has passed. The result is not sure if no half fails alone. Then only both halves together fail.
    """
    suspects, failed_alone, tries = tuple(devices), False, 0
    good: list[str] = []
    while len(suspects) > 1:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        partner = good[:1] if len(half) == 1 else []
        tries += 1
        if passes((*partner, *half)):
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
