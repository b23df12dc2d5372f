"""Arrival order of nodes: the node with ranks that all enqueue collectives later than those of the other nodes. Pure.

Nodes are compared by their clocks, so a lateness within the error of the clocks is not reported. The order of ranks
within a node needs no clock, see `arrival`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import field

from hangwatch.collectives import arrival
from hangwatch.collectives.arrival import Enqueued, Window
from hangwatch.model import ProcessId, Value
from hangwatch.model.flight_records import Library
from hangwatch.model.keyed_lists import list_by_key

MOST_TIMES = 2048  # of a node: the newest
FEWEST_RECORDS = 40


class PlaceTimes(Value, frozen=True):
    """The times at which the median rank of a node enqueued the collectives of a group with these numbers."""

    library: Library
    group: str
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    unix_ns: tuple[int, ...]


class NodeTimes(Value, frozen=True):
    """The newest collectives of a job on a node.

    `clock_error_seconds` is the largest possible error of the clock of the node; None if unknown.
    """

    node: str
    clock_error_seconds: float | None
    places: tuple[PlaceTimes, ...]


class NodeOrder(Value, frozen=True):
    """The order of the nodes of a job at the place where the latest node is named, or is latest.

    `reason` tells why no node is named; it is empty if `latest` is named. `clock_error_seconds` is twice the sum of the
    errors of two clocks: a smaller lateness proves nothing. `without_clock` are the nodes that are not compared: the
    error of their clock is unknown. The other fields are as in `arrival.ArrivalOrder`.
    """

    reason: Literal["", "NoRecords", "TooFewRecords", "NoneLate", "LateByRole", "WithinClockError"]
    latest: str | None = None
    group: str = ""
    operation: str = ""
    records: int = 0
    step_seconds: float = 0.0
    lateness_seconds: Mapping[str, float] = field(default_factory=dict)
    lateness_ratio: float = 0.0
    last_ratio: float = 0.0
    clock_error_seconds: float = 0.0
    without_clock: tuple[str, ...] = ()


def find_median_times(by_rank: Mapping[ProcessId, Iterable[Enqueued]]) -> tuple[PlaceTimes, ...]:
    """Return when the median rank enqueued each collective that all ranks of its group on this node hold."""
    times: dict[tuple[Library, str], dict[int, list[Enqueued]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[tuple[Library, str], set[ProcessId]] = defaultdict(set)
    for rank, collectives in by_rank.items():
        for collective in collectives:
            times[collective.library, collective.group][collective.number].append(collective)
            ranks[collective.library, collective.group].add(rank)
    rows = [
        (sorted(each.unix_ns for each in alike)[(len(alike) - 1) // 2], alike[0])
        for key, by_number in times.items()
        for alike in by_number.values()
        if len(alike) == len(ranks[key])
    ]
    places = list_by_key(
        ((each.library, each.group, each.operation, each.sizes), (each.number, unix_ns))
        for unix_ns, each in sorted(rows, key=lambda row: row[0])[-MOST_TIMES:]
    )
    return tuple(
        PlaceTimes(
            library=library,
            group=group,
            operation=operation,
            sizes=sizes,
            numbers=tuple(number for number, _ in values),
            unix_ns=tuple(unix_ns for _, unix_ns in values),
        )
        for (library, group, operation, sizes), values in places.items()
    )


def compare_nodes(nodes: Sequence[NodeTimes]) -> NodeOrder:
    """Return the order of the nodes of a job. Name a node if all its ranks are late by more than clocks explain."""
    errors = {node.node: node.clock_error_seconds for node in nodes if node.clock_error_seconds is not None}
    without_clock = tuple(sorted(node.node for node in nodes if node.clock_error_seconds is None))
    names: dict[ProcessId, str] = {}  # a node takes the place of a rank: the rule is the same
    collectives = {}
    for number, node in enumerate(sorted(nodes, key=lambda node: node.node)):
        if node.node in errors:
            member = ProcessId(pid=number, start_ticks=0)
            names[member], collectives[member] = node.node, list(_list_collectives(node))
    order = arrival.judge(arrival.add_reading(Window(), collectives, 0.0), 0.0, FEWEST_RECORDS)
    lateness = {names[member]: seconds for member, seconds in order.lateness_seconds.items()}
    latest = None if order.latest is None else names[order.latest]
    other_errors = [errors[name] for name in lateness if name != latest]
    error = 2 * (errors[latest] + max(other_errors)) if latest is not None and other_errors else 0.0
    is_within = order.reason == "" and latest is not None and lateness[latest] <= error
    return NodeOrder.copy_from(
        order,
        reason="WithinClockError" if is_within else order.reason,
        latest=latest,
        group=order.place.group if order.place else "",
        operation=order.place.operation if order.place else "",
        lateness_seconds=lateness,
        clock_error_seconds=error,
        without_clock=without_clock,
    )


def _list_collectives(node: NodeTimes) -> Iterable[Enqueued]:
    for place in node.places:
        for number, unix_ns in zip(place.numbers, place.unix_ns, strict=True):
            yield Enqueued(place.library, place.group, place.operation, place.sizes, number, unix_ns)
