"""The ranks in file names: `rank3.txt`, `trace-node7.out`, `attempt_0/3/stderr.log`, `gpu-a/101.txt`. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hangwatch import tables
from hangwatch.model import RankId, list_by_key

_PATTERNS = tables.Patterns("file_names.toml")
Place = tuple[str, str | None]
"""A file, and a node in the prefixes of its lines."""


class RankInName(NamedTuple):
    """The rank in a file name.

    `is_log` is true if launchers give their logs such names. `is_old` is true if an earlier attempt wrote the file.
    """

    id: RankId
    is_log: bool = False
    is_old: bool = False


def read_names(names: Iterable[str]) -> dict[str, RankInName]:
    """Return the rank in each file name, keyed by the name.

    With --log-dir, torchrun writes RUN/attempt_N/LOCAL_RANK/... (elastic/multiprocessing/api.py: DefaultLogsSpecs).
    Only the last attempt of a run counts. If there are several runs, each contains the logs of one node.
    """
    paths = {name: _to_path(name) for name in names}
    elastic = {name: match for name, path in paths.items() if (match := _PATTERNS["elastic"].match(path))}
    attempts = list_by_key((match.group(1) or "", int(match.group(2))) for match in elastic.values())
    last_attempts = {run: max(numbers) for run, numbers in attempts.items()}
    by_host = {**_read_folders(set(paths) - set(elastic), paths), **_read_host_rank_pid(paths)}
    named = {}
    for name, path in paths.items():
        layout = elastic.get(name)
        if layout is None:
            named[name] = RankInName(by_host.get(name) or read_name(path))
            continue
        run, attempt, local_rank = layout.group(1) or "", int(layout.group(2)), int(layout.group(3))
        node = run.rpartition("/")[2] if len(last_attempts) > 1 else None
        named[name] = RankInName(RankId(node=node or None, local_rank=local_rank), True, attempt < last_attempts[run])
    return named


def _read_host_rank_pid(paths: Mapping[str, str]) -> dict[str, RankId]:
    """Return the rank in each name of the form `trace-gpu-a-3-4711.txt`: host, local rank, pid.

    {} unless several files have this form, with different ranks and pids, and the lowest rank is 0.
    """
    matches = {name: match for name, path in paths.items() if (match := _PATTERNS["host_rank_pid"].search(path))}
    ids = {name: RankId(node=match.group(1), local_rank=int(match.group(2))) for name, match in matches.items()}
    pids = {(match.group(1), match.group(3)) for match in matches.values()}
    first = min((rank.local_rank or 0 for rank in ids.values()), default=1)
    return ids if len(set(ids.values())) == len(ids) == len(pids) > 1 and first == 0 else {}


def _read_folders(names: Collection[str], paths: Mapping[str, str]) -> dict[str, RankId]:
    """Return the folder of each file as its node, if several folders contain files with the same names and no rank.

    A folder may also be a round: `round1/101.txt`. So a folder with such a name, or with only numbers in its name, is
    not a node.
    """
    parted = {name: paths[name].rpartition("/") for name in names if read_name(paths[name]) == RankId()}
    bases = list_by_key({(base, folder) for folder, _, base in parted.values()})
    hosts = {name: folder.rpartition("/")[2] for name, (folder, _, _) in parted.items()}
    if all(len(folders) < 2 for folders in bases.values()) or any(
        _PATTERNS["round"].fullmatch(host) for host in hosts.values()
    ):
        return {}
    is_node = len(set(hosts.values())) == len({folder for folder, _, _ in parted.values()})
    return {name: RankId(node=host) for name, host in hosts.items()} if is_node else {}


def number_places(ranks_in: Mapping[Place, Collection[int]], unknown: Collection[Place]) -> dict[Place, int]:
    """Return the ranks of the places with lines of unknown ranks. `ranks_in` are the ranks of the other lines there.

    If each place has lines of one rank at most, that is its rank. One place with none has the rank that is left, if
    the name of another place begins alike. Else the numbers in the names of files count, if they agree with the ranks.
    """
    open_places = [place for place in unknown if len(ranks_in.get(place, ())) < 2]
    numbered_places = {place: min(ranks) for place, ranks in ranks_in.items() if len(ranks) == 1}
    families = set(map(find_family, numbered_places))
    silent = [place for place in open_places if place not in numbered_places and find_family(place) in families]
    missing = {*range(len(numbered_places) + len(silent))} - {*numbered_places.values()}
    hold_one = all(len(ranks) < 2 for ranks in ranks_in.values())
    if hold_one and len(numbered_places) > 1 and len(silent) == len(missing) and len(missing) < 2:
        return numbered_places | dict(zip(silent, missing, strict=True))
    of_names = number_logs([place[0] for place in {**numbered_places, **dict.fromkeys(open_places)}])
    if any(of_names.get(place[0]) != rank for place, rank in numbered_places.items()):
        of_names = number_logs([place[0] for place in open_places if place not in numbered_places])
    return {place: of_names[place[0]] for place in open_places if place[0] in of_names}


def find_family(place: Place) -> str:
    """Return what the names of the nodes or files of one job have in common: the beginning of `worker-3-x7k2p`.

    Pods have random endings. Of a file, only numbers and single letters differ.
    """
    return re.split(r"\d", place[1])[0] if place[1] else _PATTERNS["counter"].sub("#", without_ending(place[0]))


def number_logs(names: Collection[str]) -> dict[str, int]:
    """Return the rank of each log from its name, if the names differ in one number that can be a rank: `job-7-3.out`.

    The numbers must begin at 0 or 1 and have few gaps. Other numbers are probably pids. If several numbers differ, one
    must count from 0 without a gap, or two count all local ranks of all nodes: `node-1-gpu-3.log`.
    """
    shapes = list_by_key(
        (_PATTERNS["number"].sub("#", name), (name, list(map(int, _PATTERNS["number"].findall(name)))))
        for name in names
    )
    numbered: dict[str, int] = {}
    for alike in shapes.values():
        different = dict.fromkeys(zip(*(numbers for _, numbers in alike), strict=True))
        columns = [column for column in different if len({*column}) > 1]
        if len(columns) > 1:
            counting = [column for column in columns if sorted(column) == [*range(len(column))]]
            columns = counting or _join_columns(columns)
        for column in columns if len(columns) == 1 else ():
            if len({*column}) == len(column) and min(column) <= 1 and max(column) < 2 * len(column):
                numbered.update(zip((name for name, _ in alike), column, strict=True))
    return numbered


def _join_columns(columns: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the ranks of files that are numbered by node and local rank; [] if one is absent or listed twice."""
    nodes, locals_ = columns[0], columns[-1]
    size = max(locals_) + 1
    ranks = tuple((node - min(nodes)) * size + local for node, local in zip(nodes, locals_, strict=True))
    return [ranks] if len(columns) == 2 and min(nodes) < 2 and sorted(ranks) == [*range(len(ranks))] else []


def stack_ranks(names: Collection[str]) -> dict[str, int]:
    """Return the ranks of stack files with names that differ only in a number: `stack.0.txt`, `stack.1.txt`; `0.txt`.

    {} if the files are in several directories, if the numbers do not begin at 0, or if they have many gaps. Numbers
    with many gaps are probably pids. Numbers from 1 count something else. `node3.txt` has no rank in its name.
    """
    numbers = number_logs(names) if all(_PATTERNS["numbered_stack"].search(_to_path(name)) for name in names) else {}
    is_sure = len(set(numbers.values())) == len(names) and 0 in numbers.values()
    return numbers if is_sure else {}


def are_processes(names: Iterable[str]) -> bool:
    """True if the number in each name is that of a process, not of a round: `proc_3.log`."""
    return all(_PATTERNS["of_process"].search(_to_path(name)) for name in names)


def dump_ranks(names: Iterable[str], world_size: int | None = None) -> dict[str, tuple[int, bool]]:
    """Return the number in the name of each flight recorder dump, and true if the number is certainly a rank.

    torch writes the rank at the end of the name. A number is certainly a rank if `rank` precedes it, or if several
    names differ only in that number, and the numbers begin at 0 or 1 and have few gaps. Names without a number are left
    out. If there is a dump for each rank, and numbers repeat, they are local ranks of nodes with numbers.
    """
    bases = {name: _to_path(name).rpartition("/")[2] for name in names}
    alike = number_logs(set(bases.values()))
    ranks = {
        name: (int(match.group(1)), False)
        for name, base in bases.items()
        if (match := _PATTERNS["ends_in_number"].match(base))
    }
    ranks |= {name: (alike[base], True) for name, base in bases.items() if base in alike}
    ranks |= {name: (rank, True) for name, base in bases.items() if (rank := read_name(base).rank) is not None}
    if len({number for number, _ in ranks.values()}) == len(ranks) or len(ranks) != world_size:
        return ranks
    of_nodes = number_logs(ranks)
    return {name: (rank, True) for name, rank in of_nodes.items()} if len({*of_nodes.values()}) == len(ranks) else {}


def _to_path(name: str) -> str:
    """Return a file name with slashes, without the ending of a packed file."""
    return _PATTERNS["packed"].sub("", name.replace("\\", "/"))


def without_ending(name: str) -> str:
    """Return the last part of a file name, without the endings of logs."""
    return _PATTERNS["endings"].sub("", _to_path(name).rpartition("/")[2])


def read_name(path: str) -> RankId:
    """Return the rank, or else the node, in the name of a file. A folder may be of one rank: `rank.3/stdout`."""
    *_, folder, base = ("", *path.split("/"))
    rank = _PATTERNS["file_rank"].search(base) or _PATTERNS["file_rank"].fullmatch(folder)
    host = _PATTERNS["file_node"].match(base)
    node = host.group(host.lastindex or 0) if host and not rank else None
    return RankId(node=None if node and node.isdigit() else node, rank=int(rank.group(1)) if rank else None)
