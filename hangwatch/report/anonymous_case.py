"""An incident as an anonymous test case: the stacks of all ranks, and the verdict that they should get. Pure.

Functions and files are kept if the table of activities contains their library, or if they belong to Python. Every other
name becomes a plain word, the same word for the same name. Locals, command lines, pids, and texts of people and
programs are left out.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from hangwatch.formats import pyspy_json
from hangwatch.model import Capture, Feedback, Frame, Incident, ProcessDump, RankDump, RankId, Thread, WorkerDump
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.report import dump_text
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames

EXPECTATION_FILE = "expect.json"
_COMMAND = "python train.py"
_FIRST_PID = 1000
_PLAIN_PATH = re.compile(r"[A-Za-z_][\w+-]*(?:\.py|(?:/[\w+-]+)+\.pyx?)", re.ASCII)
_FROZEN = re.compile(r"<frozen (\w+)[\w.]*>", re.ASCII)
_GENERATED_FILES = frozenset({"<string>", "<stdin>", "<inductor>", "<eval_with_key>", "<ipython>"})
_GENERATED_FUNCTIONS = frozenset({"<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})
_NATIVE_LIBRARY = re.compile(
    r"(?:lib(?:c|m|pthread|stdc\+\+|python3|cuda|cudart|nccl|rccl|gloo|torch(?:_(?:cpu|cuda|hip|python))?|c10(?:_cuda|_hip)?)"
    r"|ld-linux-(?:x86-64|aarch64)|python)[\d.-]*(?:\.so[\d.]*)?",
    re.ASCII,
)


class UnknownAnswerError(Exception):
    """The right verdict of an incident is not known, or not in numbers. The message says why."""


def render_case(incident: Incident, feedback: Feedback, name: str) -> dict[str, str]:
    """Return the text of each file of the case by its name: `trace-node-0.out` of each node, and expect.json.

    The incident must have a capture. Raises UnknownAnswerError.
    """
    names = _Names()
    capture = incident.captures[-1]
    ranks = sorted(capture.ranks, key=lambda dump: dump.id.sort_key())
    dumps = [_anonymous_rank(dump, names) for dump in ranks]
    by_node = list_by_key((dump.id.node or "", dump) for dump in dumps)
    files = {}
    for node, node_dumps in by_node.items():
        taken = [(dump, number) for number in range(capture.rounds) for dump in node_dumps]
        lines = (line for dump, number in taken for line in dump_text.rank_lines(dump, _COMMAND, number))
        files[f"trace-{node}.out"] = "".join(f"{line}\n" for line in lines)
    expectation = {"id": name, **_describe(incident, capture), **_expect(feedback, ranks, names)}
    return {**files, EXPECTATION_FILE: msgspec.json.format(msgspec.json.encode(expectation), indent=1).decode() + "\n"}


def _describe(incident: Incident, capture: Capture) -> dict[str, Any]:
    """Return the fields about the stacks: their source, the ranks, and the groups of equal stacks."""
    is_local = _are_local(capture.ranks)
    groups = (
        sorted(number for member in group.members if (number := _number(member.id, is_local)) is not None)
        for group in incident.grouping.groups
    )
    return {
        "source": "incident of hangwatch, anonymous",
        "frames": "captured",
        "world_size": capture.world_size or len(capture.ranks),
        "ranks_in_files": len(capture.ranks),
        "groups": {f"group-{number}": group for number, group in enumerate(groups)},
        **({"rank_kind": "local"} if is_local else {}),
    }


def _expect(feedback: Feedback, ranks: Sequence[RankDump], names: _Names) -> dict[str, Any]:
    """Return the fields about the right verdict. Raises UnknownAnswerError."""
    culprits = feedback.named if feedback.is_right else tuple(filter(None, [feedback.culprit]))
    if not (culprits or feedback.is_right or feedback.named):
        raise UnknownAnswerError("the verdict names no rank and is wrong, and the culprit is not known")
    is_local = _are_local(ranks)
    numbers = [_number(rank, is_local) for rank in culprits]
    if None in numbers:
        raise UnknownAnswerError("its culprit has no rank number")
    named = (_number(rank, is_local) for rank in feedback.named)
    return {
        "expect": "name" if culprits else "abstain",
        "odd_ranks": numbers,
        "odd_nodes": list(dict.fromkeys(names.word("node-", rank.node or "") for rank in culprits)),
        "must_not_name": [number for number in named if number is not None and number not in numbers],
    }


def _are_local(ranks: Sequence[RankDump]) -> bool:
    """True if no rank has a global number."""
    return all(dump.id.rank is None for dump in ranks)


def _number(rank: RankId, is_local: bool) -> int | None:
    return rank.local_rank if is_local else rank.rank


class _Names:
    """Plain words in place of names, and numbers in place of pids, in the order of their first use."""

    def __init__(self) -> None:
        self.pids = itertools.count(_FIRST_PID)
        self._numbers: dict[str, dict[str, int]] = {}

    def word(self, kind: str, name: str, ending: str = "") -> str:
        """Return the word of this kind for a name, such as `file-3.py`."""
        numbers = self._numbers.setdefault(kind, {})
        return f"{kind}{numbers.setdefault(name, len(numbers))}{ending}"

    def frame(self, frame: Frame, is_users: bool | None) -> Frame:
        """Return the frame without names of the user. `is_users`: true if it is known to be of the user's program."""
        file = stack_frames.short_path(frame.file)
        if stack_frames.is_native(frame.function, frame.file):
            library = file.rpartition("/")[2]
            if _NATIVE_LIBRARY.fullmatch(library):
                return Frame(function=frame.function, file=library, line=frame.line)
            symbol = "0x0" if frame.function.startswith("0x") else self._public("function_", frame.function)
            return Frame(function=symbol, file=self.word("library-", file, ".so"))
        if _is_public(file) and not (is_users and stack_frames.is_standard(file)):
            return Frame(function=frame.function, file=file, line=frame.line)
        function = stack_frames.plain_name(frame.function)
        if function not in _GENERATED_FUNCTIONS:
            function = self._public("function_", function)
        return Frame(function=function, file=self._path(file), line=frame.line)

    def _path(self, file: str) -> str:
        """Return a path with the same number of folders. Folders and files of the table keep their names."""
        if file.startswith("<"):
            return file if file in _GENERATED_FILES else self.word("<generated-", file, ">")
        *folders, name = file.split("/")
        parts = [self._public("folder-", folder) if folder else "" for folder in folders]
        return "/".join([*parts, self._public("file-", name, ".py")])

    def _public(self, kind: str, name: str, ending: str = "") -> str:
        """Return a name that the table of activities contains, or its pattern with a number; else a plain word."""
        functions, parts = activity_table.load_vocabularies()
        vocabulary = functions if kind == "function_" else parts
        if name in vocabulary.plain:
            return name
        glob = vocabulary.find_glob(name)
        if glob is None:
            return self.word(kind, name, ending)
        before, _, after = glob.replace("?", "x").rpartition("*")
        return self.word(before.replace("*", ""), name, after)


def _is_public(file: str) -> bool:
    """True for a short path in the standard library, or in a library of the table of activities."""
    if frozen := _FROZEN.fullmatch(file):
        return frozen[1] in sys.stdlib_module_names
    package = file.partition("/")[0].removesuffix(".py")
    is_library = package in activity_table.packages() or stack_frames.is_standard(file)
    return is_library and _PLAIN_PATH.fullmatch(file) is not None


def _anonymous_rank(dump: RankDump, names: _Names) -> RankDump:
    """Return the part of a rank's dump that the text shows, with plain words in place of names."""
    pid = next(names.pids)
    rank = replace(dump.id, node=names.word("node-", dump.id.node or ""), pid=pid)
    workers = []
    for worker in dump.workers:
        number = next(names.pids)
        rounds = tuple(_anonymous_process(taken, number, names) for taken in worker.rounds)
        workers.append(WorkerDump(pid=number, comm="python", rounds=rounds))
    rounds = tuple(_anonymous_process(taken, pid, names) for taken in dump.rounds)
    return RankDump(id=rank, rounds=rounds, workers=tuple(workers), gone=dump.gone)


def _anonymous_process(dump: ProcessDump, pid: int, names: _Names) -> ProcessDump:
    fault = dump.fault
    if fault is not None:
        fault = replace(fault, detail=pyspy_json.find_words_about_target(fault.detail) or "the dump failed")
    threads = tuple(
        _anonymous_thread(thread, pid if thread.is_main else pid * 1000 + place, names)
        for place, thread in enumerate(dump.threads)
    )
    return ProcessDump(taken_monotonic_seconds=0.0, threads=threads, fault=fault)


def _anonymous_thread(thread: Thread, number: int, names: _Names) -> Thread:
    owners = stack_frames.find_owners([frame.file for frame in thread.frames], thread.installed_frames)
    name = thread.name or "MainThread"
    is_kept = name == "MainThread" or any(row.names.match(name) for row in activity_table.awaits_threads())
    return replace(
        thread,
        name=thread.name if is_kept else names.word("thread-", name),
        thread_id=str(number),
        frames=tuple(map(names.frame, thread.frames, owners)),
    )
