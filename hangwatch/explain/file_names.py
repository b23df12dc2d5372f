"""Pure: what the names of files tell of ranks: `rank3.txt`, `trace-node7.out`, `attempt_0/3/stderr.log`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.model import RankId

_FILE_RANK = re.compile(r"(?:^|[^a-z])rank[-_.=]?(\d{1,7})(?![\d])", re.I)
_ENDINGS = r"(?:out|txt|log|trace|dump|json|err)"
_FILE_NODE = re.compile(
    rf"^(?:trace|traces|pyspy|py-spy|stack|stacks|dump|dumps)[-_.](?!{_ENDINGS}(?:\.|$))(.+?)(?:\.{_ENDINGS})*$", re.I
)
_ELASTIC = re.compile(r"^(?:(.*)/)?attempt_(\d{1,7})/(\d{1,7})/(?:stdout\.log|stderr\.log|error\.json)$")
_NUMBER = re.compile(r"\d{1,7}")
_ENDS_IN_NUMBER = re.compile(r"^(.*?)(?<!\d)(\d{1,7})(?:\.(?:json|pkl|pickle|bin|dump|trace|txt))*$", re.I)


_NUMBERED_STACK = re.compile(
    r"(?:^|/)(?:(?:py-?spy|pystack|gdb|bt|stacks?|dumps?|traces?|proc|process)[-_.]?)?"
    r"(\d{1,7})(?:\.(?:txt|out|log|trace|stack|dump|json))*$",
    re.I,
)


class Named(NamedTuple):
    """What a name tells: `is_log` where it is one that launchers give to logs; `is_old` one of an attempt before."""

    id: RankId
    is_log: bool = False
    is_old: bool = False


def read_names(names: Iterable[str]) -> dict[str, Named]:
    """What each name tells, in the light of the others.

    torchrun's --log-dir is RUN/attempt_N/LOCAL_RANK/...: only the last attempt of a run counts, and several runs are
    several nodes (elastic/multiprocessing/api.py: DefaultLogsSpecs).
    """
    plain = {name: name.replace("\\", "/") for name in names}
    elastic = {name: found for name, path in plain.items() if (found := _ELASTIC.match(path))}
    last: dict[str, int] = {}
    for found in elastic.values():
        run = found.group(1) or ""
        last[run] = max(last.get(run, 0), int(found.group(2)))
    told = {}
    for name, path in plain.items():
        layout = elastic.get(name)
        if layout is None:
            told[name] = Named(_of_name(path))
            continue
        run, attempt, local_rank = layout.group(1) or "", int(layout.group(2)), int(layout.group(3))
        node = run.rpartition("/")[2] if len(last) > 1 else None
        told[name] = Named(RankId(node=node or None, local_rank=local_rank), True, attempt < last[run])
    return told


def number_logs(ids: Mapping[str, RankId]) -> dict[str, RankId]:
    """The ranks of logs of which nothing else tells one, where their names differ in one number: `job-7-3.out`.

    The numbers must begin at 0 or 1 and leave out few: what runs to 4711 is a pid.
    """
    shapes: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for name in ids:
        numbers = [int(number) for number in _NUMBER.findall(name)]
        shapes[_NUMBER.sub("#", name)].append((name, numbers))
    numbered = dict(ids)
    for found in shapes.values():
        columns = [column for column in zip(*(numbers for _, numbers in found), strict=True) if len(set(column)) > 1]
        if len(columns) != 1 or len(set(columns[0])) < len(found):
            continue
        if min(columns[0]) <= 1 and max(columns[0]) < 2 * len(found):
            numbered.update(
                (name, replace(ids[name], rank=number)) for (name, _), number in zip(found, columns[0], strict=True)
            )
    return numbered


def stack_ranks(names: Collection[str]) -> dict[str, int]:
    """The ranks of files of stacks that are called alike but for a number: `stack.0.txt`, `stack.1.txt`, or `0.txt`.

    Empty where they do not stand in one folder, or the numbers do not begin at 0 or leave out many: what runs to 4711
    is a pid, and what begins at 1 counts something else. `node3.txt` may hold any rank.
    """
    found = {name: _NUMBERED_STACK.search(name.replace("\\", "/")) for name in names}
    numbers = {name: int(match.group(1)) for name, match in found.items() if match is not None}
    shapes = {name[: match.start(1)] + "#" + name[match.end(1) :] for name, match in found.items() if match is not None}
    values = set(numbers.values())
    is_sure = 1 < len(values) == len(numbers) == len(names) and len(shapes) == 1
    return numbers if is_sure and min(values) == 0 and max(values) < 2 * len(values) else {}


def dump_ranks(names: Iterable[str]) -> dict[str, tuple[int, bool]]:
    """The number of each dump of a flight recorder, and whether it is sure to be a rank; left out where it has none.

    torch's writer ends the name with the rank, whatever stands before; `rank` before a number makes it sure, and so do
    several names that differ in that number alone, which begins at 0 or 1 and leaves out few.
    """
    found: dict[str, tuple[int, bool]] = {}
    shapes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name in names:
        base = name.replace("\\", "/").rpartition("/")[2]
        if (rank := _of_name(base).rank) is not None:
            found[name] = rank, True
        elif ends := _ENDS_IN_NUMBER.match(base):
            shapes[ends.group(1)].append((name, int(ends.group(2))))
    for alike in shapes.values():
        numbers = {number for _, number in alike}
        sure = 1 < len(alike) == len(numbers) and min(numbers) <= 1 and max(numbers) < 2 * len(alike)
        found.update((name, (number, sure)) for name, number in alike)
    return found


def _of_name(path: str) -> RankId:
    base = path.rsplit("/", 1)[-1]
    rank, host = _FILE_RANK.search(base), _FILE_NODE.match(base)
    if rank is None and re.fullmatch(r"std(?:out|err)(?:\.log)?", base):
        rank = _FILE_RANK.search(path.rpartition("/")[0].rpartition("/")[2])  # mpirun --output-filename: rank.3/stdout
    node = host.group(1) if host and not host.group(1).isdigit() and not rank else None
    return RankId(node=node, rank=int(rank.group(1)) if rank else None)
