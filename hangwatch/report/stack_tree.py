"""Pure: the stacks of all groups -> prefix trees, outermost frame first, each node with the ranks that are in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from hangwatch.model import Frame, Group, RankId, Value


class Node(Value, frozen=True):
    """Frames that follow one another without a branch, who is in them, and where they lead.

    `ends` are the groups whose stack ends here; a group without a stack is a node without frames.
    """

    frames: tuple[Frame, ...]
    ids: tuple[RankId, ...]
    children: tuple[Node, ...] = ()
    ends: tuple[Group, ...] = ()

    def below(self) -> Iterator[Group]:
        """The groups that end here or in a branch."""
        yield from self.ends
        for child in self.children:
            yield from child.below()


_Paths: TypeAlias = "list[tuple[tuple[Frame, ...], Group]]"


def merge_tree(groups: Sequence[Group]) -> tuple[Node, ...]:
    """Merge the representatives' stacks into as few trees as begin alike, larger branches first.

    Two frames are one where function and file agree; the line is kept only where all agree on it. Stacks that differ in
    nothing but lines part at the first that differs. A rank is counted in each node of its path, and ends in one.
    """
    paths = [(tuple(reversed(group.frames)), group) for group in groups]
    stackless = [_node([((), group)]) for group in groups if not group.frames]
    return _larger_first([*map(_node, _branches(paths)), *stackless])


def _node(paths: _Paths) -> Node:
    """One node of stacks that begin with the same frame, or of one group without a stack.

    The loop follows the frames that all share; it recurses at branches only, and those are fewer than groups.
    """
    ids = sorted((member.id for _, group in paths for member in group.members), key=RankId.sort_key)
    frames = []
    while len(_branches(paths)) == 1 and all(path for path, _ in paths):
        frames.append(_shared(path[0] for path, _ in paths))
        paths = [(path[1:], group) for path, group in paths]
    return Node(
        frames=tuple(frames),
        ids=tuple(ids),
        children=_larger_first(map(_node, _branches(paths))),
        ends=tuple(group for path, group in paths if not path),
    )


def _branches(paths: _Paths) -> list[_Paths]:
    branches: dict[tuple[str, str], _Paths] = {}
    for path, group in paths:
        if path:
            branches.setdefault(path[0].place, []).append((path, group))
    return [part for branch in branches.values() for part in _by_line(branch)]


def _by_line(branch: _Paths) -> list[_Paths]:
    """The branch, in parts where some of its stacks differ in the line of this frame and in no name."""
    if len({path[0].line for path, _ in branch}) == 1:
        return [branch]
    lines: dict[int | None, _Paths] = {}
    named: dict[tuple[tuple[str, str], ...], set[int | None]] = {}
    for path, group in branch:
        lines.setdefault(path[0].line, []).append((path, group))
        named.setdefault(tuple(frame.place for frame in path), set()).add(path[0].line)
    differ = any(len(found) > 1 for found in named.values())
    return list(lines.values()) if differ and None not in lines else [branch]


def _shared(frames: Iterable[Frame]) -> Frame:
    first, *others = frames
    same_line = all(other.line == first.line for other in others)
    return Frame(function=first.function, file=first.file, line=first.line if same_line else None)


def _larger_first(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=lambda node: -len(node.ids)))
