"""The role of one process in a job, by its own data: a launcher, or a process with a rank slot. Pure.

A rank slot is a rank and the numbers that belong to it, read from the variables that launchers set. All processes
below a rank inherit the same variables. `membership` decides which of these processes is the rank.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from hangwatch import words
from hangwatch.formats import process_title, python_files
from hangwatch.model import Process, Waiting
from hangwatch.tables import secret_forms
from hangwatch.tables.launchers import TABLE, Launcher, RankVariables

MAX_LOCAL_RANKS = 1024
MAX_RANKS = 1 << 20  # the largest clusters have about 200,000 GPUs

_BY_PROGRAM = {name: row for row in TABLE.launchers for name in row.programs}
_BY_COMM = {comm: row for row in TABLE.launchers for comm in row.comms}
_MAX_TOLD = 64  # characters of each option of a launcher
_MOST_COMMANDS = 1024  # that are remembered; a scan reads at most 4 KiB of each
_MAX_NAME_READ = 253  # a host name with its domain
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class RankSlot(NamedTuple):
    """A rank slot: the rank in the environment of a process, and the table row with the names of the variables.

    `doubts` are sentences about numbers that are too large to be true. These numbers are ignored.
    """

    launcher: str
    variables: RankVariables
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    attempt: int
    doubts: tuple[str, ...] = ()


def find_launcher(process: Process) -> Launcher | None:
    """Return the row of the launcher that this process is (torchrun, srun); None if it is not a launcher."""
    row = _BY_PROGRAM.get(program(process.cmdline))
    if row is not None:
        return row
    row = _BY_COMM.get(process.comm)
    return row if row is not None and re.match(row.title, " ".join(process.cmdline)) else None


def find_waiting(process: Process) -> Waiting | None:
    """Return the options of a launcher that say for which ranks it waits; None for any other process.

    None also for a launcher that is not a job without ranks (see `alone` in the table). The options are user input.
    They are cut short and shown, but no decision depends on them. A process without a command line is about to
    execute another program.
    """
    row = find_launcher(process)
    if row is None or not process.cmdline or not {program(process.cmdline), process.comm} & set(row.alone):
        return None
    options = row.rendezvous_options
    if options is None:
        return Waiting(launcher=row.name)
    endpoint = _read_option(process, options.endpoint)
    if not endpoint:
        endpoint = ":".join(filter(None, (_read_option(process, options.address), _read_option(process, options.port))))
    return Waiting(
        launcher=row.name,
        run_id=_read_option(process, options.run_id),
        nodes=_read_option(process, options.nodes),
        endpoint=endpoint,
    )


def _read_option(process: Process, names: Sequence[str]) -> str:
    """Return the value of the first of these options or variables that is set; "" if none is. "_" is read as "-"."""
    for name in names:
        value = _option(process.cmdline, name) if name.startswith("--") else process.environ.get(name, "")
        if value:
            return words.elided(secret_forms.mask(value), _MAX_TOLD)
    return ""


def _option(cmdline: Sequence[str], wanted: str) -> str:
    for at, argument in enumerate(cmdline):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == wanted:
            return value if equals else "".join(cmdline[at + 1 : at + 2])
    return ""


def base_name(path: str) -> str:
    """Return `PurePosixPath(path).name`, but ten times faster, because a scan calls it for every process."""
    name = path.rpartition("/")[2]
    return name if name not in ("", ".") else PurePosixPath(path).name


@lru_cache(maxsize=_MOST_COMMANDS)
def program(cmdline: tuple[str, ...]) -> str:
    """Return the program in a command line: the module after -m, "-c", the script's name, or the program itself."""
    if not cmdline:
        return ""
    name = base_name(cmdline[0])
    if not python_files.is_interpreter(name):
        return name
    arguments = iter(cmdline[1:])
    for argument in arguments:
        if argument == "-m":
            return next(arguments, "")
        if argument in _OPTIONS_WITH_VALUE:
            next(arguments, "")
        elif argument == "-c" or not argument.startswith("-"):
            return base_name(argument)
    return name


def program_name(cmdline: Sequence[str]) -> str:
    """Return the program in a command line as one word without secrets, because all users may read it.

    A process that sets its title can have its whole command line in its first argument. Of `ray::Actor.method` it is
    the class of the actor.
    """
    name = program((*" ".join(cmdline[:1]).split(), *cmdline[1:]))
    name = name.partition("::")[2].partition(".")[0] or name
    return secret_forms.mask("".join(name.split()[:1]))


def find_rank_slot(process: Process, launcher: Launcher | None = None) -> RankSlot | None:
    """Return the rank slot in a process's environment; None if it has none.

    `launcher` is the row of the nearest launcher among its ancestors. The rows of the table are tried in order.
    RANK and WORLD_SIZE come first: with torchrun under srun, the variables of Slurm belong to torchrun's agent.
    """
    if not process.environ:  # true of most processes of a node, at each scan
        return None
    for row in TABLE.launchers:
        is_below = launcher is not None and launcher.name == row.name
        if row.ranks is None or (row.ranks.only_below and not is_below):
            continue
        slot = _read_rank_slot(process.environ, row.name, row.ranks)
        # A single process under srun or mpirun is not a rank: a notebook, for example, or a launcher of ranks.
        if slot is not None and (slot.world_size != 1 or row.ranks.read_by_torch):
            return slot
    return None


def scheduler_job_id(environ: Mapping[str, str]) -> str:
    """Return the scheduler's id of the job, with the step if it is not the first; "" if no scheduler set an id."""
    for scheduler in TABLE.schedulers:
        job_id = environ.get(scheduler.job_id)
        if job_id:
            step = environ.get(scheduler.step, "")
            is_later = step.isdecimal() and 0 < int(step) < 1 << 31  # batch and extern count down from 2^32
            return job_id + (f".{step}" if is_later else "")
    return ""


def job_name(environ: Mapping[str, str], *, in_pod: bool, node: str) -> str:
    """Return the name that the user chose for the job, by the first variable of the table that has one; else ""."""
    for row in TABLE.names:
        value = environ.get(row.variable, "")[:_MAX_NAME_READ]
        is_of_node = row.is_host_name and value.partition(".")[0] == node.partition(".")[0]
        if not value or is_of_node or (row.only_in_pod and not in_pod):
            continue
        found = (re.fullmatch(pattern, value) for pattern in row.patterns)
        if name := words.plain_word(value if not row.patterns else next((one[1] for one in found if one), "")):
            return name
    return ""


def node_number(environ: Mapping[str, str], slot: RankSlot) -> int | None:
    """Return the number of this node in the job from the launcher's variable; None if not set or not plausible."""
    return _number(environ, slot.variables.node_id)


def run_id(environ: Mapping[str, str], slot: RankSlot) -> str:
    """Return the launcher's name of the run, which is the same on all nodes; "" if the run has no name."""
    name = environ.get(slot.variables.job_id, "")
    return "" if name == slot.variables.no_job_id else name


def guess_launcher(environ: Mapping[str, str], slot: RankSlot) -> str:
    """Return the launcher of a rank from a variable that only this launcher sets; else "plain".

    It is used if no process of this node is the launcher of the rank.
    """
    return slot.launcher if slot.variables.started_by_first or slot.variables.job_id in environ else "plain"


def rendezvous(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return address and port at which the ranks meet; "" for a variable that is not set."""
    return environ.get(TABLE.rendezvous.address, ""), environ.get(TABLE.rendezvous.port, "")


def is_python(process: Process) -> bool:
    """True if the process runs Python: by its executable, else by its name, its command line or its title."""
    if process.is_python is not None:
        return process.is_python
    if process.comm.startswith(TABLE.python_comms):
        return True
    title = process_title.read(first := "".join(process.cmdline[:1]))
    return python_files.is_interpreter(base_name(first)) or (title is not None and title.is_scoped)


def title_of(process: Process) -> process_title.Title | None:
    """Return the title that a process has set for itself; None without a usable title."""
    title = process_title.read(process.cmdline[0] if process.cmdline else process.comm)
    return title if title is not None and title.name else None


def has_overwritten_environ(process: Process) -> bool:
    """True for Python that wrote a title over its command line and environment, see setproctitle(3)."""
    is_titled = bool(process.cmdline) and not python_files.is_interpreter(base_name(process.cmdline[0]))
    return bool(process.is_python) and is_titled and not process.environ


def is_loader_worker(process: Process) -> bool:
    """True if this is a DataLoader worker. It inherits the command line and the environment of its rank."""
    return process.comm == "pt_data_worker"


def is_resource_tracker(process: Process) -> bool:
    """True if this is the resource tracker of multiprocessing, for which no rank waits."""
    return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline)


def may_be_rank(process: Process) -> bool:
    """True for Python that is neither a launcher nor a helper of another process."""
    is_helper = is_loader_worker(process) or is_resource_tracker(process)
    return is_python(process) and not is_helper and find_launcher(process) is None


def starts_helpers(process: Process) -> bool:
    """True for a process that only has helpers below it, apart from processes with another rank slot."""
    is_fork_server = any("multiprocessing.forkserver" in argument for argument in process.cmdline)
    return is_fork_server or is_resource_tracker(process) or program(process.cmdline) == "hangwatch"


def is_multiprocessing(process: Process) -> bool:
    """True if multiprocessing or a DataLoader started this process with the program of its parent."""
    return is_loader_worker(process) or any("multiprocessing." in argument for argument in process.cmdline)


def is_spawned(process: Process) -> bool:
    """True if multiprocessing started this process with its spawn method, as mp.spawn does."""
    return not is_loader_worker(process) and any("multiprocessing.spawn" in argument for argument in process.cmdline)


def is_server(process: Process) -> bool:
    """True if the command line names a program that serves requests or a notebook."""
    return serves_requests(process) or _is_named(process, TABLE.notebooks)


def serves_requests(process: Process) -> bool:
    """True if the command line names a program that serves requests."""
    return _is_named(process, TABLE.servers)


def _is_named(process: Process, words_in_name: Sequence[str]) -> bool:
    return any(word in argument.lower() for argument in process.cmdline[:4] for word in words_in_name)


def is_idle(process: Process) -> bool:
    """True if the title of this worker says that it has nothing to do."""
    return process.comm.startswith(TABLE.idle_titles)


def _read_rank_slot(environ: Mapping[str, str], launcher: str, variables: RankVariables) -> RankSlot | None:
    rank, world_size = _number(environ, variables.rank), _number(environ, *variables.size)
    doubts = _describe_doubts(environ, variables.size, MAX_RANKS) if world_size is None else []
    if rank is None or (world_size is None and not doubts) or (world_size is not None and rank >= world_size):
        return None
    local_world_size = _number(environ, *variables.local_size) or _local_tasks(environ, variables)
    doubts += _describe_doubts(environ, variables.local_size, MAX_LOCAL_RANKS)
    if local_world_size is not None and not 0 < local_world_size <= min(world_size or MAX_RANKS, MAX_LOCAL_RANKS):
        local_world_size = None
    local_rank = _number(environ, *variables.local_rank)
    return RankSlot(
        launcher=launcher,
        variables=variables,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank if local_rank is not None and local_rank < MAX_LOCAL_RANKS else None,
        local_world_size=local_world_size,
        attempt=_number(environ, variables.attempt) or 0,
        doubts=tuple(doubts),
    )


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of these variables with a number of at most MAX_RANKS; None if there is none."""
    for name in names:
        value = environ.get(name, "")
        if value.isascii() and value.isdecimal() and len(value) < 10 and int(value) <= MAX_RANKS:
            return int(value)
    return None


def _describe_doubts(environ: Mapping[str, str], names: Sequence[str], most: int) -> list[str]:
    """Return a sentence about each of these variables with a number above `most`."""
    said = ((name, environ.get(name, "")) for name in names)
    numbers = [(name, value) for name, value in said if value.isascii() and value.isdecimal()]
    return [
        f"{name} = {words.elided(value, 20)} is ignored: must be at most {most:,}"
        for name, value in numbers
        if len(value.lstrip("0")) > 9 or int(value) > most
    ]


def _local_tasks(environ: Mapping[str, str], variables: RankVariables) -> int | None:
    """Return the number of tasks of the Slurm step on this node, 4 on node 2 of "8(x2),4"; None if unknown."""
    node = _number(environ, variables.node_id)
    layout = next(filter(None, map(environ.get, variables.tasks_per_node)), "")
    if node is None:
        return None
    for part in layout.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,7})\))?", part)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None
