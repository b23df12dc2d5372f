"""Prefix trees of the stacks of all groups, the outermost frame first. A node lists the ranks that are in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from hangwatch.model import Frame, Group, RankId, Value, list_by_key


class Node(Value, frozen=True):
    """Consecutive frames without a branch, the ranks that are in them, and the branches that follow.

    `ends` are the groups with a stack that ends here. A group without a stack is a node without frames.
    """

    frames: tuple[Frame, ...]
    ids: tuple[RankId, ...]
    children: tuple[Node, ...] = ()
    ends: tuple[Group, ...] = ()

    def below(self) -> Iterator[Group]:
        """Yield the groups with a stack that ends at this node or below it."""
        yield from self.ends
        for child in self.children:
            yield from child.below()


_Paths: TypeAlias = "list[tuple[tuple[Frame, ...], Group]]"


def merge_tree(groups: Sequence[Group]) -> tuple[Node, ...]:
    """Merge the stacks of all groups into as few trees as possible. The larger branches come first.

    Frames with the same function and file are merged. The line is kept if all of them have the same line. Stacks that
    differ only in lines branch at the first different line. A rank is listed in each node of its path.
    """
    paths = [(tuple(reversed(group.frames)), group) for group in groups]
    stackless = [_make_node([((), group)]) for group in groups if not group.frames]
    return _sort_by_size([*map(_make_node, _find_branches(paths)), *stackless])


def _make_node(paths: _Paths) -> Node:
    """Return the node of stacks that begin with the same frame, or the node of one group without a stack.

    The loop follows the common frames. The function calls itself only at branches, and there are fewer branches than
    groups.
    """
    ids = sorted((member.id for _, group in paths for member in group.members), key=RankId.sort_key)
    frames = []
    while len(_find_branches(paths)) == 1 and all(path for path, _ in paths):
        frames.append(_merge_frames(path[0] for path, _ in paths))
        paths = [(path[1:], group) for path, group in paths]
    return Node(
        frames=tuple(frames),
        ids=tuple(ids),
        children=_sort_by_size(map(_make_node, _find_branches(paths))),
        ends=tuple(group for path, group in paths if not path),
    )


def _find_branches(paths: _Paths) -> list[_Paths]:
    branches = list_by_key((path[0].place, (path, group)) for path, group in paths if path)
    return [part for branch in branches.values() for part in _split_by_line(branch)]


def _split_by_line(branch: _Paths) -> list[_Paths]:
    """Split the branch by the line of its first frame, if some of its stacks differ only in lines."""
    if len({path[0].line for path, _ in branch}) == 1:
        return [branch]
    lines = list_by_key((path[0].line, (path, group)) for path, group in branch)
    lines_of_places = list_by_key((tuple(frame.place for frame in path), path[0].line) for path, _ in branch)
    differ = any(len(set(numbers)) > 1 for numbers in lines_of_places.values())
    return list(lines.values()) if differ and None not in lines else [branch]


def _merge_frames(frames: Iterable[Frame]) -> Frame:
    first, *others = frames
    same_line = all(other.line == first.line for other in others)
    return Frame(function=first.function, file=first.file, line=first.line if same_line else None)


def _sort_by_size(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=lambda node: -len(node.ids)))
