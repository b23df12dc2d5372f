"""Workers of inference engines, as the table of launchers describes them. Pure.

The workers of an engine hold parts of a model and wait for each other, like ranks. They are not ranks of a training
job: an engine without requests is idle, and its power proves nothing. The other processes of an engine are helpers.
"""

from collections.abc import Collection
from typing import NamedTuple

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_tree import INIT_PID, Tree, is_within, start_order
from hangwatch.model import Process, ProcessId
from hangwatch.tables.launchers import TABLE

_TITLES = tuple(title for row in TABLE.engines for title in row.titles)
_BY_PROGRAM = {program: row for row in TABLE.engines for program in row.programs}


class EngineWorkers(NamedTuple):
    """The workers of one engine, and the process that identifies it: its topmost process, None if unknown."""

    engine: str
    head: Process | None
    workers: list[Process]


def find_engine(process: Process, tree: Tree) -> str | None:
    """Return the name of the engine for which this process works; None for other processes.

    A title is taken from the comm, because a command line that was read before the title was set is kept.
    """
    if process.comm.startswith(_TITLES):  # a scan asks for every process of the node
        return next(row.name for row in TABLE.engines if process.comm.startswith(row.titles))
    row = _BY_PROGRAM.get(process_role.program(process.cmdline)) if process.cmdline else None
    return row.name if row is not None and _is_below(process, row.server, tree) else None


def find_engines(tree: Tree, ranks: Collection[int]) -> list[EngineWorkers]:
    """Return the engines with their workers in the order of start, without processes below the pids in `ranks`."""
    engines: dict[tuple[str, Owner, ProcessId | None, str], EngineWorkers] = {}
    workers = [(process, engine) for process in tree if (engine := find_engine(process, tree)) is not None]
    for process, engine in sorted(workers, key=lambda worker: start_order(worker[0])):
        if is_within(process, ranks, tree):
            continue
        head = _find_head(process, tree)
        # Actors of Ray have no head: the variable with the name of their Ray job distinguishes them.
        name = "" if head else process_role.job_name(process.environ, in_pod=False, node="")
        key = engine, owner_of(process), head.id if head else None, name
        engines.setdefault(key, EngineWorkers(engine, head, [])).workers.append(process)
    return list(engines.values())


def _is_below(process: Process, word: str, tree: Tree) -> bool:
    return any(word in argument for up in tree.ancestors(process) for argument in (up.comm, *up.cmdline[:4]))


def _find_head(process: Process, tree: Tree) -> Process | None:
    """Return the topmost process of the worker's engine, or the launcher above it; else its parent.

    None if that is init, or a launcher of many jobs.
    """
    head = None
    for up in tree.ancestors(process):
        launcher = process_role.find_launcher(up)
        if launcher is not None:
            return head if launcher.is_shared else up
        if not any(
            up.comm.startswith(row.comms) or row.server in process_role.program(up.cmdline) for row in TABLE.engines
        ):
            break
        head = up
    parent = tree.parent(process)
    return head or (None if parent is None or parent.id.pid == INIT_PID else parent)
