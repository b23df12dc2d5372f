"""The fingerprint of a hang, by which the same hang is known on other nodes and days. Pure."""

from collections.abc import Iterable

from hangwatch import words
from hangwatch.model import Group


def make_fingerprint(suspects: Iterable[Group], groups: Iterable[Group]) -> str:
    """Return the fingerprint of a hang: 12 hex digits; "" without any stack.

    It is a hash of the keys of the suspects' groups and of the largest other group that waits. A key contains the
    functions and files of a stack, without lines, pids and addresses. So it is equal on all nodes.
    """
    keys = {group.key for group in suspects if group.frames}
    waiting = (group for group in groups if group.frames and group.waits_for in ("ranks", "gpu"))
    others = (group for group in waiting if group.key not in keys)
    largest = max(others, key=lambda group: (group.size, group.key), default=None)
    parts = [*sorted(keys), "", "" if largest is None else largest.key]
    return hash_parts(parts) if any(parts) else ""


def hash_parts(parts: Iterable[str]) -> str:
    """Return 12 hex digits that are equal for equal parts."""
    return words.checksum("|".join(parts).encode("utf-8", "replace"), 6)
