"""Search for the device that makes a test fail, by bisection. Pure."""

from collections.abc import Callable, Sequence

from hangwatch.model import Value

Passes = Callable[[Sequence[str]], bool]
"""A function that runs a test with only these devices and returns true if the test passes."""


class Halved(Value, frozen=True):
    """The suspects of a bisection, and the number of tests. `is_sure`: one suspect, and a test with it failed."""

    suspects: tuple[str, ...]
    is_sure: bool
    tries: int


def halve(devices: Sequence[str], passes: Passes) -> Halved:
    """Find the device that makes a test of all these devices fail. One bad device needs 1 + log2(devices) tests.

    If the first half passes, the search continues in the other half. A single device is tested together with a
    device that has passed. If neither half fails alone, only both together fail: then the result is not sure.
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
