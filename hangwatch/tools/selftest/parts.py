"""The parts of a self-test over several nodes: the ranks of each node, and the joined result. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hangwatch import words
from hangwatch.model import Value
from hangwatch.tools.selftest.launch import Course, Place
from hangwatch.tools.selftest.outcome import Event

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9,-]+)")

Layout = Mapping[str, tuple[str, ...]]
"""The devices of each node, in the order of their ranks."""


class Offer(Value, frozen=True):
    """The devices that a node can test, and a free port of this node. Times are by the node's clock."""

    devices: tuple[str, ...]
    port: int
    printed_unix_seconds: float


class Part(Value, frozen=True):
    """The result of the ranks of one node. Times are by the node's clock."""

    course: Course
    printed_unix_seconds: float


AnswerT = TypeVar("AnswerT", Offer, Part)


def units(offers: Mapping[str, Offer]) -> tuple[str, ...]:
    """Return every device of every node as `node:device`. Bisecting this list separates nodes first, then devices."""
    return tuple(f"{node}:{device}" for node, offer in offers.items() for device in offer.devices)


def layout_of(chosen: Sequence[str]) -> Layout:
    """Return the layout, the devices of each node, of some of `units`."""
    layout: dict[str, tuple[str, ...]] = {}
    for unit in chosen:
        node, _, device = unit.rpartition(":")
        layout[node] = (*layout.get(node, ()), device)
    return layout


def written(layout: Layout) -> str:
    """Return a layout as one word that is safe in a shell: `gpu001:0-3,6/gpu002:0-7`."""
    return "/".join(f"{node}:{words.fold(map(int, devices))}" for node, devices in layout.items())


def read(text: str) -> Layout:
    """Parse a layout that `written` has returned. Raises ValueError."""
    layout: dict[str, tuple[str, ...]] = {}
    for entry in text.split("/"):
        match = _ENTRY.fullmatch(entry)
        devices = words.unfold(match[2]) if match else None
        if match is None or not devices:
            raise ValueError(f"{words.elided(entry, 80)!r} is not NODE:DEVICES")
        layout[match[1]] = tuple(map(str, devices))
    return layout


def place_of(layout: Layout, node: str, port: int) -> Place:
    """Return the ranks of a node; the master is the first node. Raises ValueError if the layout lacks it."""
    nodes = list(layout)
    if node not in layout:
        raise ValueError(f"{words.elided(node, 80)!r} is not among the nodes")
    first_rank = sum(len(layout[earlier]) for earlier in nodes[: nodes.index(node)])
    return Place(first_rank=first_rank, world_size=sum(map(len, layout.values())), master=nodes[0], port=port)


def joined(layout: Layout, courses: Mapping[str, Course]) -> Course:
    """Join the results of all nodes. From each node, only results of its own ranks are used."""
    events: list[Event] = []
    exits: dict[int, int | None] = {}
    last_words: dict[int, str] = {}
    first = 0
    for node, devices in layout.items():
        ranks = range(first, first + len(devices))
        first += len(devices)
        if (course := courses.get(node)) is not None:
            events += [event for event in course.events if event.rank in ranks]
            exits |= {rank: code for rank, code in course.exits.items() if rank in ranks}
            last_words |= {rank: line for rank, line in course.last_words.items() if rank in ranks}
    return Course(events=tuple(events), exits=exits, last_words=last_words)
