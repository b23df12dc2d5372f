"""Pure: a test over nodes: which ranks are of which node, and what all of them said as one course."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hangwatch import words
from hangwatch.model import Value
from hangwatch.selftest.launch import Course, Place
from hangwatch.selftest.outcome import Event

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9,-]+)")

Layout = Mapping[str, tuple[str, ...]]
"""The devices of each node, in the order of their ranks."""


class Offer(Value, frozen=True):
    """What a node could test: its devices, and a port that is free there. By the node's clock."""

    devices: tuple[str, ...]
    port: int
    printed_unix_seconds: float


class Part(Value, frozen=True):
    """What the ranks of one node said. By the node's clock."""

    course: Course
    printed_unix_seconds: float


AnswerT = TypeVar("AnswerT", Offer, Part)


def units(offers: Mapping[str, Offer]) -> tuple[str, ...]:
    """Every device of every node, as `node:device`: so halves of them are nodes before they are devices of one."""
    return tuple(f"{node}:{device}" for node, offer in offers.items() for device in offer.devices)


def layout_of(chosen: Sequence[str]) -> Layout:
    """The layout of some of `units`."""
    found: dict[str, tuple[str, ...]] = {}
    for unit in chosen:
        node, _, device = unit.rpartition(":")
        found[node] = (*found.get(node, ()), device)
    return found


def written(layout: Layout) -> str:
    """A layout as one word that no shell reads otherwise: `gpu001:0-3,6/gpu002:0-7`."""
    return "/".join(f"{node}:{words.fold(map(int, devices))}" for node, devices in layout.items())


def read(text: str) -> Layout:
    """What `written` wrote. Raises ValueError."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in text.split("/"):
        match = _ENTRY.fullmatch(entry)
        devices = words.unfold(match[2]) if match else None
        if match is None or not devices:
            raise ValueError(f"{words.elided(entry, 80)!r} is no node with its devices")
        found[match[1]] = tuple(map(str, devices))
    return found


def place_of(layout: Layout, node: str, port: int) -> Place:
    """Where the ranks of a node are; all meet at the first node. Raises ValueError for a node that is not in it."""
    nodes = list(layout)
    if node not in layout:
        raise ValueError(f"{words.elided(node, 80)!r} is not among the nodes")
    before = sum(len(layout[one]) for one in nodes[: nodes.index(node)])
    world_size = sum(map(len, layout.values()))
    return Place(first_rank=before, world_size=world_size, master=nodes[0], port=port)


def joined(layout: Layout, courses: Mapping[str, Course]) -> Course:
    """The courses of all nodes as one; a node speaks of its own ranks alone."""
    events: list[Event] = []
    exits: dict[int, int | None] = {}
    last_words: dict[int, str] = {}
    first = 0
    for node, devices in layout.items():
        own = range(first, first + len(devices))
        first += len(devices)
        if (course := courses.get(node)) is not None:
            events += [event for event in course.events if event.rank in own]
            exits |= {rank: code for rank, code in course.exits.items() if rank in own}
            last_words |= {rank: said for rank, said in course.last_words.items() if rank in own}
    return Course(events=tuple(events), exits=exits, last_words=last_words)
