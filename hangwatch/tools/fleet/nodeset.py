"""Sets of nodes as Slurm prints them, `node[01-128]`, or with ClusterShell's operators and groups, `@group!node[1-2]`.

The two tools differ where digits stand before a bracket: `rack26[1-100]` is 100 nodes for Slurm, and 25,840 for
ClusterShell, which joins the digits to both ends of the range (findings/clustershell-digits-before-bracket.sh).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

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

    names: Iterator[str]
    if not _OPERATORS.search(text):
        names = itertools.chain.from_iterable(map(_expand, filter(None, _COMMA.split(text))))
    elif re.search(r"[0-9]\[", text):
        raise NodesError(
            f"--nodes {text[:80]}: digits before a bracket are ambiguous beside operators: write dgx[100-132]"
        )
    elif any(max(map(len, ends)) > 18 or int(ends[1]) - int(ends[0]) > MOST_NODES for ends in _ENDS.findall(text)):
        raise _too_many(text)  # before it takes memory
    else:
        try:
            names = map(str, NodeSet(text))
        except (NodeSetException, GroupResolverError) as error:
            raise NodesError(f"--nodes {text[:80]}: {error}") from None
    listed = list(itertools.islice(names, MOST_NODES + 1))
    if len(listed) > MOST_NODES:
        raise _too_many(text)
    if not listed:
        raise NodesError(f"--nodes {text[:80]!r}: contains no node")
    return check_names(list(dict.fromkeys(listed)))


def _too_many(text: str) -> NodesError:
    return NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")


def check_names(names: list[str]) -> list[str]:
    """Return the names unchanged. Raises NodesError for a name that is not a host name."""
    strange = next((name for name in names if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise NodesError(f"--nodes: {strange!r} is not a host name")
    return names


def _expand(text: str) -> Iterator[str]:
    """Return the names in one part, such as `gpu[01-40,50]-ib`, in order. Raises NodesError."""
    pieces = re.split(r"\[([^\[\]]*)\]", text)
    if stray := re.search(r"[\[\]]", "".join(pieces[::2])):
        raise NodesError(f"--nodes {text[:80]}: a bracket is never {'closed' if stray[0] == '[' else 'opened'}")
    return _join(pieces[::2], [[_parse_range(each, text) for each in piece.split(",")] for piece in pieces[1::2]])


def _parse_range(text: str, whole: str) -> tuple[range, int]:
    """Return the numbers of a range, and their digits: they are as wide as the first one was written."""
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if match is None or last < first:
        raise NodesError(f"--nodes {whole[:80]}: {text[:40]!r} is not a range of numbers, such as 1-40")
    return range(first, last + 1), len(match[1])


def _join(texts: Sequence[str], brackets: Sequence[Sequence[tuple[range, int]]]) -> Iterator[str]:
    """Yield the texts around the brackets with each number of the brackets between them."""
    if not brackets:
        yield texts[0]
        return
    for numbers, digits in brackets[0]:
        for number in numbers:
            for rest in _join(texts[1:], brackets[1:]):
                yield f"{texts[0]}{number:0{digits}d}{rest}"
