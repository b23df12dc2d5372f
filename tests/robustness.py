"""Check that a hang gets the same verdict if its dumps have another form. `make robustness` runs this.

usage: python -m tests.robustness [--verbose] [FOLDER...]

The cases are those of tests/data/hangs.toml and servers.toml, and the folders in FOLDER that hold `expect.json` and
dumps (`trace-*.out`). Each case is judged as it is and in every form of `VARIATIONS` and `TEXTS`: another py-spy,
another Python, half of the ranks, a text without prefixes and titles. For each form, print three numbers: changed
verdicts, verdicts with an innocent rank to check first (column `elsewhere`), and named innocent ranks. Exit with 1
if an innocent rank is named, or if a node is to be excluded: no case is a fault of hardware.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from hangwatch.model import Frame, ProcessDump, RankDump, RankId, Thread, Verdict
from hangwatch.report import dump_text
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.verdict import judge
from tests import titled_processes
from tests.hangs import CASES, SETTINGS, TABLE, rank_dumps

_LIBRARIES = "/opt/conda/lib/python3.11/site-packages/"
_STANDARD_LIBRARY = "/opt/conda/lib/python3.11/"
_USER = "/home/user/"
_KNOWN_LIBRARIES = activity_table.packages() | sys.stdlib_module_names
_NATIVE_LEAF = Frame(function="__poll", file="libc.so.6")

_COMMAND = "python train.py"

Place = tuple[str | None, int | None]
"""A node and a rank on it. The node is None if ranks are numbered over the whole job, or known by their pids."""


class Case(NamedTuple):
    """A known hang and its guilty ranks. `numbers` is the kind of number that identifies a rank.

    `processes` are the processes of servers.toml, ranks and others.
    """

    name: str
    ranks: tuple[RankDump, ...]
    world_size: int | None
    guilty: frozenset[Place]
    numbers: Literal["rank", "local_rank", "pid"] = "rank"
    processes: tuple[Mapping[str, Any], ...] = ()

    def named_places(self, verdict: Verdict) -> frozenset[Place]:
        """Return the ranks that the verdict names, in the form of `guilty`."""
        return frozenset(map(self.place, verdict.named))

    def place(self, rank: RankId) -> Place:
        """Return the rank in the form of `guilty`."""
        return (rank.node if self.numbers == "local_rank" else None, getattr(rank, self.numbers))


def known_cases() -> Iterator[Case]:
    """Yield the cases of tests/data/hangs.toml and servers.toml.

    A case in which no rank can be named has its guilty ranks in the column `guilty` or `check`.
    """
    for case in CASES:
        guilty = frozenset((None, rank) for rank in case.get("guilty", case.get("named", ())))
        yield Case(case["name"], tuple(rank_dumps(case)), case.get("world_size"), guilty)
    for case in titled_processes.CASES:
        guilty = frozenset((None, pid) for pid in (*case.get("named", ()), *case.get("check", ())))
        ranks = traces.collect(titled_processes.sources(case)).ranks
        yield Case(case["name"], ranks, None, guilty, "pid", tuple(case["processes"]))


def cases_of(folder: Path) -> Iterator[Case]:
    """Yield the cases in a folder: each case is a subfolder."""
    for place in sorted(expectation.parent for expectation in folder.glob("*/expect.json")):
        expect = json.loads((place / "expect.json").read_text())
        local = expect.get("rank_kind") == "local"
        node = expect["odd_nodes"][0] if local else None
        sources = ((str(path), path.read_text().splitlines()) for path in sorted(place.glob("trace-*.out")))
        collected = traces.collect(sources)
        guilty = frozenset((node, rank) for rank in expect["odd_ranks"])
        numbers: Literal["rank", "local_rank"] = "local_rank" if local else "rank"
        yield Case(place.name, collected.ranks, collected.world_size, guilty, numbers)


# --- the forms -----------------------------------------------------------------------------------------------------


def _native_leaf(thread: Thread) -> Thread:
    if not thread.frames:
        return thread
    told = thread.installed_frames
    return replace(
        _with_frames(thread, (_NATIVE_LEAF, *thread.frames)), installed_frames=None if told is None else told + 1
    )


def _qualified(frame: Frame) -> Frame:
    """Return the frame with its function's name as Python 3.11 and later have it."""
    plain = frame.function.isidentifier() and not stack_frames.is_native(frame.function, frame.file)
    return replace(frame, function=f"Owner.{frame.function}") if plain else frame


def _plain(frame: Frame) -> Frame:
    """Return the frame with its function's name as Python 3.10 and earlier have it."""
    native = stack_frames.is_native(frame.function, frame.file)
    return frame if native else replace(frame, function=stack_frames.plain_name(frame.function))


def _whole_paths(thread: Thread) -> Thread:
    """Return the thread with whole paths, which show the library of a file: `py-spy --full-filenames`."""
    whole = (replace(frame, file=_whole(frame.file, thread, index)) for index, frame in enumerate(thread.frames))
    return replace(_with_frames(thread, whole), installed_frames=None)


def _whole(file: str, thread: Thread, index: int) -> str:
    top, folder, _ = file.partition("/")
    if not file.endswith(".py") or not top or file.startswith("<"):
        return file
    if not folder and top.removesuffix(".py") in sys.stdlib_module_names:
        return _STANDARD_LIBRARY + file
    if _is_installed(file, thread, index):
        return _LIBRARIES + file
    return _USER + file


def _with_library_frame_counts(thread: Thread) -> Thread:
    """Return the thread with its number of innermost library frames, which only py-spy's JSON has."""
    frames = itertools.takewhile(lambda place: _is_installed(place[1].file, thread, place[0]), enumerate(thread.frames))
    return replace(thread, installed_frames=sum(1 for _ in frames))


def _is_installed(file: str, thread: Thread, index: int) -> bool:
    top, folder, _ = file.partition("/")
    if thread.installed_frames is not None:
        return index < thread.installed_frames or top in _KNOWN_LIBRARIES
    return top in _KNOWN_LIBRARIES if folder else not file.endswith(".py") or top[:-3] in sys.stdlib_module_names


def _with_frames(thread: Thread, frames: Iterable[Frame]) -> Thread:
    return replace(thread, frames=tuple(frames))


def _each_thread(change: Callable[[Thread], Thread]) -> Callable[[Sequence[RankDump]], list[RankDump]]:
    def changed(dump: ProcessDump) -> ProcessDump:
        return replace(dump, threads=tuple(map(change, dump.threads)))

    def vary(ranks: Sequence[RankDump]) -> list[RankDump]:
        return [
            replace(
                rank,
                rounds=tuple(map(changed, rank.rounds)),
                workers=tuple(replace(worker, rounds=tuple(map(changed, worker.rounds))) for worker in rank.workers),
            )
            for rank in ranks
        ]

    return vary


def _each_frame(change: Callable[[Frame], Frame]) -> Callable[[Sequence[RankDump]], list[RankDump]]:
    return _each_thread(lambda thread: _with_frames(thread, map(change, thread.frames)))


def _by_number(ranks: Sequence[RankDump]) -> list[RankDump]:
    return sorted(ranks, key=lambda rank: rank.id.sort_key())


VARIATIONS: dict[str, Callable[[Sequence[RankDump]], Sequence[RankDump]]] = {
    "all threads active": _each_thread(lambda thread: replace(thread, active=True)),
    "all threads idle": _each_thread(lambda thread: replace(thread, active=False)),
    "no line numbers": _each_frame(lambda frame: replace(frame, line=None)),
    "no flag of the GIL": _each_thread(lambda thread: replace(thread, owns_gil=None)),
    "no names of threads": _each_thread(lambda thread: replace(thread, name=None)),
    "one more native leaf": _each_thread(_native_leaf),
    "qualified names": _each_frame(_qualified),
    "plain names": _each_frame(_plain),
    "whole paths": _each_thread(_whole_paths),
    "with counts of library frames": _each_thread(_with_library_frame_counts),
    "the last round only": lambda ranks: [replace(rank, rounds=rank.rounds[-1:]) for rank in ranks],
    "the first half of the ranks": lambda ranks: _by_number(ranks)[: (len(ranks) + 1) // 2],
    "the second half of the ranks": lambda ranks: _by_number(ranks)[len(ranks) // 2 :],
    "every second rank": lambda ranks: _by_number(ranks)[::2],
    "every other second rank": lambda ranks: _by_number(ranks)[1::2],
    "ranks in reverse order": lambda ranks: _by_number(ranks)[::-1],
}


def _text_without_prefixes(case: Case) -> list[RankDump]:
    """Return the ranks that are found in a text without prefixes. The text has no measurements: these are kept."""
    pids = [rank.id.pid for rank in case.ranks]
    by_pid = dict(
        zip(pids if len(set(pids) - {None}) == len(pids) else range(1, 1 + len(pids)), case.ranks, strict=True)
    )
    lines: list[str] = []
    for pid, rank in by_pid.items():
        unknown = RankId(pid=pid)
        text = dump_text.rank_lines(replace(rank, id=unknown), _COMMAND)
        lines += [line.removeprefix(dump_text.prefix(unknown)) for line in text]
    return [by_pid[rank.id.pid] for rank in _collect_text(lines)]


def _text_without_titles(case: Case) -> list[RankDump]:
    """Return the ranks as read from a text in which all processes have the same command line; [] without titles."""
    return _collect_text(line for process in case.processes for line in titled_processes.pyspy_text(process, _COMMAND))


def _collect_text(lines: Iterable[str]) -> Sequence[RankDump]:
    return traces.collect([("stacks.txt", lines)]).ranks


TEXTS: dict[str, Callable[[Case], Sequence[RankDump]]] = {
    "a text without prefixes": _text_without_prefixes,
    "a text without titles": _text_without_titles,
}


# --- the run ---------------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """A case in one form, with the verdict on this form and on the original form."""

    case: Case
    variation: str
    before: Verdict
    after: Verdict

    @property
    def changed(self) -> bool:
        """True if the verdict or the named ranks differ."""
        return (self.before.kind, set(self.before.named)) != (self.after.kind, set(self.after.named))

    @property
    def innocents(self) -> frozenset[Place]:
        """Return the ranks that are named but not guilty."""
        return self.case.named_places(self.after) - self.case.guilty

    @property
    def checks_innocent_first(self) -> bool:
        """True if a rank to check first is not guilty. The verdict does not blame such a rank."""
        return not {self.case.place(rank) for rank in self.after.check_first} <= self.case.guilty

    def __str__(self) -> str:
        return f"{self.case.name}, {self.variation}: {self.before.kind} -> {self.after.kind}: {self.after.message}"


def vary(case: Case) -> Iterator[Judged]:
    """Judge the case in every form that keeps at least one rank."""
    before = _verdict(case, case.ranks)
    yield Judged(case, "as it is", before, before)
    for name, variation in VARIATIONS.items():
        if ranks := variation(case.ranks):
            yield Judged(case, name, before, _verdict(case, ranks))
    for name, read_text in TEXTS.items():
        if ranks := read_text(case):
            yield Judged(case, name, before, _verdict(case, ranks))


def _verdict(case: Case, ranks: Sequence[RankDump]) -> Verdict:
    return judge.judge(group_ranks(ranks, TABLE, SETTINGS, case.world_size))


def _row(name: str, judged: Sequence[Judged]) -> str:
    changed, innocents = sum(one.changed for one in judged), sum(len(one.innocents) for one in judged)
    elsewhere = sum(one.checks_innocent_first for one in judged)
    return (
        f"{name:32} {len(judged):7,} {changed:9,} {changed / max(len(judged), 1):7.1%} {elsewhere:10,} {innocents:11,}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each form, and the totals. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--verbose", action="store_true", help="also print each verdict that changes")
    options: Any = parser.parse_args(arguments)
    cases = [*known_cases(), *(case for folder in options.folders for case in cases_of(folder))]
    judged = [one for case in cases for one in vary(case)]
    print(f"{'form':32} {'judged':>7} {'changed':>9} {'share':>7} {'elsewhere':>10} {'innocents':>11}")
    for name in ("as it is", *VARIATIONS, *TEXTS):
        print(_row(name, [one for one in judged if one.variation == name]))
    print(_row(f"all, of {len(cases)} cases", [one for one in judged if one.variation != "as it is"]))
    for one in judged:
        if one.innocents:
            print(f"NAMES AN INNOCENT RANK  {one}")
        elif options.verbose and one.changed:
            print(f"changed  {one}")
    return 1 if any(one.innocents or one.after.action.exclude_nodes for one in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
