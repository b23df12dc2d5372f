"""Sets of nodes as Slurm prints them, `node[01-128]`, or with ClusterShell's operators and groups, `@group!node[1-2]`.

The two tools differ where digits stand before a bracket: `rack26[1-100]` is 100 nodes for Slurm, and 25,840 for
ClusterShell, which joins the digits to both ends of the range (findings/clustershell-digits-before-bracket.sh).
"""

from __future__ import annotations

import itertools
import math
import re
from typing import NamedTuple

from hangwatch.errors import UserError

MOST_NODES = 1 << 16
_OPERATORS = re.compile(r"[@!&^*/%]")  # of ClusterShell; Slurm has none of them
_COMMA = re.compile(r"[,\s]+(?![^\[]*\])")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_ENDS = re.compile(r"([0-9]+)-([0-9]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class NodesError(UserError):
    """An invalid set of nodes. The message gives the reason."""


def expand(text: str) -> list[str]:
    """Return the names in a set of nodes, each once. Raises NodesError.

    Only host names are accepted. A name that begins with "-" would be an option of ssh.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException
    from ClusterShell.NodeUtils import GroupResolverError

    if not _OPERATORS.search(text):
        parts = [_parse(part) for part in _COMMA.split(text) if part]
        if sum(part.size for part in parts) > MOST_NODES:
            raise NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")
        names = list(dict.fromkeys(name for part in parts for name in part.names()))
    elif re.search(r"[0-9]\[", text):
        raise NodesError(
            f"--nodes {text[:80]}: digits before a bracket are ambiguous beside operators: write dgx[100-132]"
        )
    elif any(max(map(len, ends)) > 18 or int(ends[1]) - int(ends[0]) > MOST_NODES for ends in _ENDS.findall(text)):
        raise NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")  # before it takes memory
    else:
        try:
            nodes = NodeSet(text)
            if len(nodes) > MOST_NODES:
                raise NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")
            names = [str(name) for name in nodes]
        except (NodeSetException, GroupResolverError) as error:
            raise NodesError(f"--nodes {text[:80]}: {error}") from None
    if not names:
        raise NodesError(f"--nodes {text[:80]!r}: contains no node")
    return check_names(names)


def check_names(names: list[str]) -> list[str]:
    """Return the names unchanged. Raises NodesError for a name that is not a host name."""
    strange = next((name for name in names if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise NodesError(f"--nodes: {strange!r} is not a host name")
    return names


class _Part(NamedTuple):
    """One name with its ranges, such as `gpu[01-40,50]-ib`: the texts around the brackets, and what is in them."""

    texts: list[str]
    brackets: list[list[_Range]]

    @property
    def size(self) -> int:
        """The number of names."""
        return math.prod(sum(each.last - each.first + 1 for each in ranges) for ranges in self.brackets)

    def names(self) -> list[str]:
        """Return the names, in order."""
        numbers = ([number for each in ranges for number in each.numbers()] for ranges in self.brackets)
        begin, *others = self.texts
        return [
            begin + "".join(number + text for number, text in zip(row, others, strict=True))
            for row in itertools.product(*numbers)
        ]


class _Range(NamedTuple):
    """A range of numbers, which are as wide as the first one was written."""

    first: int
    last: int
    digits: int

    def numbers(self) -> list[str]:
        return [f"{number:0{self.digits}d}" for number in range(self.first, self.last + 1)]


def _parse(text: str) -> _Part:
    pieces = re.split(r"\[([^\[\]]*)\]", text)
    if stray := re.search(r"[\[\]]", "".join(pieces[::2])):
        raise NodesError(f"--nodes {text[:80]}: a bracket is never {'closed' if stray[0] == '[' else 'opened'}")
    return _Part(pieces[::2], [[_parse_range(each, text) for each in piece.split(",")] for piece in pieces[1::2]])


def _parse_range(text: str, whole: str) -> _Range:
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if match is None or last < first:
        raise NodesError(f"--nodes {whole[:80]}: {text[:40]!r} is not a range of numbers, such as 1-40")
    return _Range(first, last, len(match[1]))
