"""Merging of the groups of ranks from many nodes. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.json import encode
from msgspec.structs import force_setattr, replace

from hangwatch import words
from hangwatch.formats.sighting import SWITCH_ADDRESS, Sighting
from hangwatch.model import Group, Grouping, Job, list_by_key
from hangwatch.stacks.grouping import merge_groups

_MOST_APART_SECONDS = 600.0
LONGEST_LIST = 200
_SWITCH_CHARACTERS = 64


def merge_all(groupings: Iterable[Grouping]) -> Grouping:
    """Merge groupings: `merge_all([group(a), group(b)]) == group(a + b)`, in any order.

    The world size is the largest of those that are known.
    """
    parts = tuple(groupings)
    sizes = [part.world_size for part in parts if part.world_size is not None]
    return merge_groups(
        (group for part in parts for group in part.groups),
        max(sizes, default=None),
        (note for part in parts for note in part.notes),
    )


def find_leaf_switch(address: str) -> str:
    """Return the leaf switch in `address`, the value of SLURM_TOPOLOGY_ADDR, as short printable text; "" without one.

    The value lists the switches from the root to the node, separated by dots. See srun(1).
    """
    *_, switch, node = ["", "", *address.split(".")]
    return words.elided(words.printable(switch), _SWITCH_CHARACTERS) if node else ""


class SightingCollector:
    """The newest sighting of each job on each node, added in any order. Equal stacks are stored once."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, Sighting]] = defaultdict(dict)
        self._older: dict[str, list[str]] = defaultdict(list)
        self._shown: dict[Group, Group] = {}
        self._values: dict[object, object] = {}

    def add(self, sighting: Sighting) -> None:
        """Add a sighting. Of several sightings of one job on one node, only the newest counts."""
        key, node = sighting.job.key, sighting.node
        before = self._newest[key].get(node)
        if before is not None:
            self._older[key].append(node)
            if _age(before) > _age(sighting):
                return
        self._share_values(sighting.grouping)
        groups = tuple(map(self._with_shared_stacks, sighting.grouping.groups))
        self._newest[key][node] = replace(sighting, grouping=replace(sighting.grouping, groups=groups))

    @property
    def jobs(self) -> Mapping[str, Job]:
        """The jobs by key. The data of a job are from the first of its nodes, by name."""
        return {key: found[min(found)].job for key, found in sorted(self._newest.items())}

    def nodes(self, key: str) -> frozenset[str]:
        """Return the nodes with a sighting of a job."""
        return frozenset(self._newest[key])

    def ranks_here(self, key: str) -> int | None:
        """Return the number of ranks on the node of a job; None if unknown, or if it has sightings of several nodes."""
        sightings = list(self._newest[key].values())
        return sightings[0].job.ranks_here or None if len(sightings) == 1 else None

    def leaves(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the leaf switch of each node. Nodes on which Slurm did not pass it to the ranks are left out."""
        said = ((node, one) for key in keys for node, one in self._newest[key].items())
        found = ((node, find_leaf_switch(one.job.environ.get(SWITCH_ADDRESS, ""))) for node, one in said)
        return {node: leaf for node, leaf in found if leaf}

    def merge_jobs(self, keys: Iterable[str]) -> Grouping:
        """Merge the groups of the jobs with these keys. Contradictions between nodes become notes."""
        keys = list(keys)
        sightings = [found for key in keys for _, found in sorted(self._newest[key].items())]
        merged = merge_all(sighting.grouping for sighting in sightings)
        older = [node for key in keys for node in self._older[key]]
        notes = [*_apart(sightings), *_sizes(sightings), *_claimed_twice(merged)]
        if older:
            ignored = f"{words.count(len(older), 'older incident')} of {_nodes(older)} ignored"
            notes.insert(0, f"{ignored}: only the newest incident of a node is used")
        return replace(merged, notes=(*merged.notes, *notes))

    def _share_values(self, grouping: Grouping) -> None:
        """Store equal values (frames, shapes) of the ranks once. This halves the memory that a large job needs."""
        one = self._values.setdefault
        for group in grouping.groups:
            for member in group.members:
                force_setattr(member.stack, "user_frames", one(member.stack.user_frames, member.stack.user_frames))
                for recorder in member.recorder.libraries:
                    for records in recorder.groups:
                        for done in records.operations:
                            force_setattr(done, "operation", one(done.operation, done.operation))
                            force_setattr(done, "dtypes", one(done.dtypes, done.dtypes))
                            force_setattr(done, "sizes", one(done.sizes, done.sizes))

    def _with_shared_stacks(self, group: Group) -> Group:
        """Return an equal group. It shares the stacks of an earlier group if they are equal."""
        memberless = replace(group, members=())
        return replace(self._shown.setdefault(memberless, memberless), members=group.members)


def _age(sighting: Sighting) -> tuple[float, bytes]:
    return sighting.opened_unix_seconds, encode(sighting)


# --- contradictions --------------------------------------------------------------------------------------------------


def _nodes(nodes: Iterable[str]) -> str:
    return words.elided(words.fold_nodes(nodes), LONGEST_LIST)


def _apart(sightings: Sequence[Sighting]) -> Iterator[str]:
    """Yield a note if the sightings are more than ten minutes apart, because they may be of two hangs."""
    ordered = sorted(sightings, key=lambda one: (one.opened_unix_seconds, one.node))
    first, last = ordered[0], ordered[-1]
    apart = last.opened_unix_seconds - first.opened_unix_seconds
    if apart > _MOST_APART_SECONDS:
        yield (
            f"the incidents began {words.duration(apart)} apart: on {words.printable(first.node)} at "
            f"{words.utc(first.opened_unix_seconds)}, on {words.printable(last.node)} at "
            f"{words.utc(last.opened_unix_seconds)}; they may be of two hangs"
        )


def _sizes(sightings: Sequence[Sighting]) -> Iterator[str]:
    by_size = list_by_key(
        (one.grouping.world_size, one.node) for one in sightings if one.grouping.world_size is not None
    )
    if len(by_size) > 1:
        told = "; ".join(f"{size:,} on {_nodes(nodes)}" for size, nodes in sorted(by_size.items())[:4])
        yield f"nodes report different world sizes ({told}); the largest is used"


def _claimed_twice(grouping: Grouping) -> Iterator[str]:
    claims: dict[int, str | None] = {}
    twice: set[int] = set()
    nodes: set[str] = set()
    for member in grouping.members:
        rank, node = member.id.rank, member.id.node
        if rank is not None and claims.setdefault(rank, node) != node:
            twice.add(rank)
            nodes.update(filter(None, (claims[rank], node)))
    if twice:
        yield f"rank {words.elided(words.fold(twice), LONGEST_LIST)} is on more than one node: {_nodes(nodes)}"
